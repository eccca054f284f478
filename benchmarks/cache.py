"""What `GradientCache` holds and costs: live tensors of a step, and its time, for a contrastive loss on a vision model.

`python benchmarks/cache.py` prints a table: the whole batch, the cache as it is (micro-batches run again, one after
the other), and the same as one graph whose micro-batches are checkpoints. Weights and the gradients that are there
before the step are not in the figures.
"""
import os
os.environ.setdefault('OMP_NUM_THREADS', '1')
import argparse, statistics, sys, time
from pathlib import Path
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchvision import models
from benchmarks.live import peak_of
from fastaccum.cache import GradientCache
from fastaccum.core.batch import bounds, even_sizes
from fastaccum.core.replay import CachedCall

def loss_func(z):
    z = F.normalize(z)
    return F.cross_entropy(z@z.T/0.5, torch.arange(len(z)).roll(1))

def arms(model, x, size):
    "Steps to compare, each a function without arguments"
    cb = GradientCache(micro_batch_size=size)
    def step(predict):
        def f():
            for p in model.parameters():
                if p.grad is not None: p.grad.zero_()   # as fastai's optimizers do
            loss_func(predict()).backward()
        return f
    def cached(): return CachedCall(cb, model, model.forward, (x,), len(x)).forward()
    def one_graph():
        cuts = bounds(evenly(len(x), size))
        return torch.cat([checkpoint(model, x[a:b], use_reentrant=False) for a,b in cuts])
    return {'whole batch':step(lambda: model(x)), 'GradientCache':step(cached),
        'as one graph of checkpoints':step(one_graph)}

def main(names=('resnet18','resnet50'), bs=32, size=8, px=128, rounds=5):
    print(f'Batches of {bs} at {px} px, micro-batches of {size}\n')
    print('| model | | MB of live tensors | seconds | ratio |\n|---|---|---|---|---|')
    for nm in names:
        torch.manual_seed(0)
        model,x = getattr(models, nm)(num_classes=128),torch.randn(bs, 3, px, px)
        fs = arms(model, x, size)
        peaks = {k:peak_of(f)/1e6 for k,f in fs.items()}
        secs = {k:[] for k in fs}
        for _ in range(rounds):   # alternated, because machines are noisy
            for k,f in fs.items():
                start = time.thread_time()
                f()
                secs[k].append(time.thread_time()-start)
        secs = {k:statistics.median(o) for k,o in secs.items()}
        for k in fs:
            ratio = secs[k]/secs['whole batch']
            print(f'| {nm} | {k} | {peaks[k]:.0f} | {secs[k]:.2f} | {ratio:.2f} |', flush=True)

if __name__=='__main__':
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--rounds', type=int, default=5)
    main(rounds=parser.parse_args().rounds)
