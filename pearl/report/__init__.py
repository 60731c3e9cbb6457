"""The static report of a run: one HTML file that needs neither the network nor PEARL to look at."""
