"""What a model asks of whoever runs it: masks, attention's arguments, rope, dtypes, files; and whether PEARL can.

``survey`` runs a model on the meta device and reads off its attention calls; ``attach`` makes a real model use PEARL's
attention as the survey says; ``probe`` is the survey as a program, asked before anything of a run starts.
"""
