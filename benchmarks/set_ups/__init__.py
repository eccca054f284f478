"""Set-ups of others, on micro-batches: the table of the page "Works with".

Each is a function that makes a Learner as a public notebook or library does, with its loss, callbacks and
hyperparameters. Nothing is copied: the lines are ours, after the file that is named. Data and models are small. Names
that we did not choose are those of the original.
`python -m benchmarks.set_ups` writes `benchmarks/results/set_ups.json` and the table, in about a minute of one core.
"""
