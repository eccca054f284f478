"""The time of a micro-batch of two small models with fastaccum and its options, with fastai, and in a bare loop.

`python -m benchmarks.overhead` (or `make bench`) prints a table, for use while you change the code. It does not need
the other libraries of `make peers`.
"""
import warnings
warnings.filterwarnings('ignore')
import torch
from fastaccum import GradientAccumulation, NoiseScale
from . import table
from .peers.fast import Tiny, Transformer, compare, load
from .peers.fastaccum import Fastaccum

class Auto(Fastaccum):
    title = "fastaccum, 'auto'"
    def accumulation(self, micro, accum): return [GradientAccumulation(accum, micro_batch_size='auto')]

class WithNoiseScale(Fastaccum):
    title = 'fastaccum with NoiseScale()'
    def accumulation(self, micro, accum): return [GradientAccumulation(accum), NoiseScale()]

def main():
    torch.set_num_threads(1)
    classes = load(['fastai','fastaccum'])|dict(auto=Auto, noise=WithNoiseScale)
    for model,ks in ((Tiny,(1,4,16)),(Transformer,(4,))):
        found = [compare(classes, model, rounds=5, k=k, n_batches=200) for k in ks]
        rows = [[o.title,*(f"{res[nm]['us']:.0f} ({res[nm]['to_bare']:.2f})" for res in found)]
            for nm,o in classes.items()]
        print(f'{model.__name__}: µs per micro-batch (to the bare loop), with k micro-batches per step\n')
        print(table(['',*(f'k = {k}' for k in ks)], rows)+'\n', flush=True)

if __name__=='__main__': main()
