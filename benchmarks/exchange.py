"""What several processes exchange: bytes and time per sample, with fastaccum and without.

For 1, 2, 4 and 8 micro-batches a step. `python benchmarks/exchange.py [--processes 2] [--out FILE] [--plot FILE]`
launches processes on this machine (gloo), prints a table, appends it to the first file with date, versions and
hardware, and draws the second.
"""
import os
os.environ.setdefault('OMP_NUM_THREADS', '1')
import argparse, platform, statistics, sys, time, warnings
from pathlib import Path
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.several import arguments, ended, joined, learner, measured, printed, versions
warnings.filterwarnings('ignore')

bs,n_batches,rounds,ks = 16,64,5,(1,2,4,8)
arms = ("fastai's callback",'fastaccum')

def worker(out):
    "One of the processes: for each k and arm, bytes and seconds of the exchanges, and seconds of the fit"
    import torch
    from torch import distributed as dist, nn
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel
    from fastai.callback.training import GradientAccumulation as FastaiGradientAccumulation
    from fastaccum import GradientAccumulation

    class Exchanged:
        "What the exchanges of gradients took: fastai's callback leaves them to DDP, fastaccum adds up by itself"
        def __init__(self): self.nbytes,self.secs = 0,0.
        def hook(self, bucket:dist.GradBucket)->torch.futures.Future[torch.Tensor]:
            self.nbytes += bucket.buffer().nbytes
            start = time.perf_counter()
            def done(fut):
                self.secs += time.perf_counter()-start
                return fut.value()
            return allreduce_hook(None, bucket).then(done)
        def all_reduce(self, tensor, *args, **kwargs):
            self.nbytes += tensor.nbytes
            start = time.perf_counter()
            res = stock(tensor, *args, **kwargs)
            self.secs += time.perf_counter()-start
            return res

    stock = dist.all_reduce
    def run(acc):
        torch.manual_seed(0)
        data = [(torch.randn(bs,64), torch.randint(10, (bs,))) for _ in range(n_batches)]
        model = DistributedDataParallel(nn.Sequential(nn.Linear(64,1024), nn.ReLU(), nn.Linear(1024,1024), nn.ReLU(),
            nn.Linear(1024,10)))
        exchanged,ours = Exchanged(),isinstance(acc, GradientAccumulation)
        if ours: dist.all_reduce = exchanged.all_reduce
        else: model.register_comm_hook(exchanged, Exchanged.hook)
        learn = learner(data, bs, model)
        dist.barrier()
        start = time.perf_counter()
        try: learn.fit(1, 1e-3, cbs=acc)
        finally: dist.all_reduce = stock
        return exchanged.nbytes,exchanged.secs,time.perf_counter()-start

    joined()
    res = {k:{nm:[] for nm in arms} for k in ks}
    for i in range(rounds+1):
        for k in ks:
            # fastai's counts the samples of its own process, fastaccum those of all
            cbs = FastaiGradientAccumulation(bs*k),GradientAccumulation(bs*k*dist.get_world_size())
            for nm,acc in list(zip(arms, cbs))[::1 if i%2 else -1]:
                vals = run(acc)
                if i: res[k][nm].append(vals)   # the first round warms up
    ended(res, out)

def measure(n):
    "For each k and arm: bytes, milliseconds of exchange and milliseconds in all, per sample of a process"
    def per_sample(runs):
        return [statistics.median(o[i] for o in runs)/(bs*n_batches)*(1e3 if i else 1) for i in range(3)]
    return {int(k):{nm:per_sample(o) for nm,o in v.items()} for k,v in measured(__file__, n).items()}

def plot(res, fn):
    import matplotlib
    matplotlib.use('agg')
    import matplotlib.pyplot as plt
    fig,axs = plt.subplots(1, 2, figsize=(9,3.2))
    for ax,i,label in ((axs[0],0,'KiB exchanged per sample'), (axs[1],1,'ms of exchange per sample')):
        for nm in arms:
            ax.plot(list(res), [o[nm][i]/(1024 if not i else 1) for o in res.values()], marker='o', label=nm)
        ax.set(xlabel='micro-batches a step', ylabel=label, xticks=list(res), ylim=(0,None))
    axs[0].legend(loc='center right')
    fig.tight_layout()
    fig.savefig(fn, dpi=100)

def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--processes', type=int, default=2)
    parser.add_argument('--out', type=Path, help='append the table to this file')
    parser.add_argument('--plot', type=Path, help='draw this file')
    args = arguments(parser, f'{os.cpu_count()} cores of an {platform.machine()} CPU')
    if args.worker: return worker(args.worker)
    import fastaccum
    res = measure(args.processes)
    lines = [f'fastaccum {fastaccum.__version__}, {versions()}; '
        f'1.1 million parameters, {n_batches} micro-batches of {bs}, {rounds} rounds, medians; per sample of a process',
        '',
        '| micro-batches a step | | KiB exchanged | ms of exchange | ms in all |', '|---|---|---|---|---|']
    for k,o in res.items():
        for nm,(nbytes,ex,ms) in o.items(): lines.append(f'| {k} | {nm} | {nbytes/1024:.1f} | {ex:.3f} | {ms:.3f} |')
    printed(f'{args.processes} processes on {args.hardware}, gloo', lines, args.out)
    one = res[ks[0]]['fastaccum'][0]
    for k,o in res.items():
        assert abs(o['fastaccum'][0]*k/one-1)<1e-9, f'{k} micro-batches a step: not 1/{k} of the bytes'
    if args.plot: plot(res, args.plot)

if __name__=='__main__': main()
