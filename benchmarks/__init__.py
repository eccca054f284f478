"Scripts that measure. `python -m benchmarks.peers` compares fastaccum with others"
