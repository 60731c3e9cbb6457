"""The simulator: the coordinator's core on a virtual clock, with a request-level model of everything around it.

Its timing uses none of the formulas that decisions are made with, or the decision engine would grade itself.
"""
