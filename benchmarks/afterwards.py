"""What `micro_batch_size='auto'` costs on several processes while memory suffices: gradients are exchanged after the
backward passes, and not meanwhile.

For 1, 2, 4 and 8 micro-batches a step. `python benchmarks/afterwards.py [--processes 2] [--out FILE]` launches
processes on this machine (gloo), which take turns with both, prints a table, and appends it to the file with date,
versions and hardware.
"""
import os
os.environ.setdefault('OMP_NUM_THREADS', '1')
import argparse, platform, statistics, sys, time, warnings
from pathlib import Path
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.several import arguments, ended, joined, learner, measured, printed, versions
warnings.filterwarnings('ignore')

bs,n_batches,rounds,ks,width,layers = 32,32,9,(1,2,4,8),1024,4
arms = {'within the last backward pass':None, "afterwards (`'auto'`)":'auto'}

def worker(out):
    "One of the processes: for each k, arm and round, milliseconds of a step, and of those the exchange of afterwards"
    import torch
    from torch import distributed as dist, nn
    from torch.nn.parallel import DistributedDataParallel
    from fastaccum import GradientAccumulation
    from fastaccum.processes.sync import Together

    secs = [0.]
    stock = Together.exchange
    def exchange(self):
        start = time.perf_counter()
        stock(self)
        secs[0] += time.perf_counter()-start

    def run(k, size):
        torch.manual_seed(0)
        data = [(torch.randn(bs,width), torch.randint(10, (bs,))) for _ in range(n_batches)]
        net = [o for _ in range(layers) for o in (nn.Linear(width,width), nn.ReLU())]
        learn = learner(data, bs, DistributedDataParallel(nn.Sequential(*net, nn.Linear(width,10))))
        acc = GradientAccumulation(bs*k*dist.get_world_size(), micro_batch_size=size)
        learn.fit(1, 1e-3, cbs=acc)   # DDP arranges its memory
        dist.barrier()
        secs[0],start = 0.,time.perf_counter()
        learn.fit(1, 1e-3, cbs=acc)
        return [o*1e3*k/n_batches for o in (time.perf_counter()-start, secs[0])]

    Together.exchange = exchange
    joined()
    res = {k:{nm:[] for nm in arms} for k in ks}
    for i in range(rounds+1):
        for k in ks:
            for nm,size in list(arms.items())[::1 if i%2 else -1]:
                vals = run(k, size)
                if i: res[k][nm].append(vals)   # the first round warms up
    ended(res, out)

def measure(n):
    "For each k and arm: milliseconds of each round's steps, and of their exchanges afterwards"
    return {int(k):o for k,o in measured(__file__, n).items()}

def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--processes', type=int, default=2)
    parser.add_argument('--out', type=Path, help='append the table to this file')
    args = arguments(parser, f'{os.cpu_count()} cores of an {platform.machine()} CPU')
    if args.worker: return worker(args.worker)
    import fastaccum
    res,med = measure(args.processes),statistics.median
    lines = [f'fastaccum {fastaccum.__version__}, {versions()}; '
        f'{(width+1)*(width*layers+10)/1e6:.1f} million parameters, micro-batches of {bs}, {n_batches} a fit, '
        f'{rounds} rounds in turns; ms of a step, medians', '',
        f"| micro-batches a step | {' | '.join(arms)} | the exchange of it | ratio, quartiles of the rounds |",
        '|---|---|---|---|---|']
    for k,o in res.items():
        (a,_),(b,ex) = ([med(v) for v in zip(*o[nm])] for nm in arms)
        lo,mid,hi = statistics.quantiles([y[0]/x[0] for x,y in zip(*o.values())], n=4)
        lines.append(f'| {k} | {a:.1f} | {b:.1f} | {ex:.1f} | {mid:.2f} ({lo:.2f} to {hi:.2f}) |')
    printed(f'{args.processes} processes on {args.hardware}, gloo', lines, args.out)

if __name__=='__main__': main()
