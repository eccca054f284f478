"""Set-ups of others, on micro-batches: the table of the page "Works with".

Each is a function that makes a Learner as a public notebook or library does, with its loss, callbacks and
hyperparameters. Nothing is copied: the lines are ours, after the file that is named. Data and models are small. Names
that we did not choose are those of the original.
`python -m benchmarks.set_ups` writes the table, `benchmarks/results/set_ups.md`, in about two minutes of one core.
"""
