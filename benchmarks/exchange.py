"""Bytes and time per sample of the exchange of gradients between processes, with fastaccum and with fastai's callback.

Steps have 1, 2, 4 and 8 micro-batches. `python -m benchmarks.exchange [--processes 2]` starts processes on this
machine, which use gloo, and writes its table into `results/exchange.md`.
"""
import argparse, datetime, json, os, subprocess, sys, tempfile, time, warnings
from pathlib import Path
from statistics import median
import benchmarks
from functools import partial
import torch
from torch import distributed as dist, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from fastai.callback.training import GradientAccumulation as FastaiGradientAccumulation
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.optimizer import SGD
from fastaccum import GradientAccumulation, ImportOrderWarning
warnings.filterwarnings('ignore', category=ImportOrderWarning)   # this script uses fastai's class on purpose

bs,n_batches,rounds,ks = 16,64,5,(1,2,4,8)
stock_all_reduce = dist.all_reduce

class Exchanged:
    "Counts bytes and seconds of exchanges: by a hook of DDP for fastai's callback, by `all_reduce` for fastaccum"
    def __init__(self): self.nbytes,self.secs = 0,0.
    def hook(self, bucket:dist.GradBucket)->torch.futures.Future[torch.Tensor]:
        "Count an exchange of DDP (a communication hook)"
        self.nbytes += bucket.buffer().nbytes
        start = time.perf_counter()
        def done(fut):
            self.secs += time.perf_counter()-start
            return fut.value()
        return allreduce_hook(None, bucket).then(done)
    def all_reduce(self, tensor, *args, **kwargs):
        "Count an exchange by fastaccum (replaces `dist.all_reduce`)"
        self.nbytes += tensor.nbytes
        start = time.perf_counter()
        res = stock_all_reduce(tensor, *args, **kwargs)
        self.secs += time.perf_counter()-start
        return res

def run(k, is_fastaccum):
    "Fit in this process, in steps of `k` micro-batches; return bytes and seconds of exchanges, and seconds of the fit"
    torch.manual_seed(0)
    data = benchmarks.Batches([(torch.randn(bs,64), torch.randint(10, (bs,))) for _ in range(n_batches)], bs)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64,1024), nn.ReLU(), nn.Linear(1024,1024), nn.ReLU(),
        nn.Linear(1024,10)))
    exchanged,dls = Exchanged(),DataLoaders(data, benchmarks.Batches([], bs), device='cpu')
    learn = benchmarks.quiet(Learner(dls, model, nn.CrossEntropyLoss(), opt_func=SGD))
    if is_fastaccum:
        dist.all_reduce = exchanged.all_reduce
        acc = GradientAccumulation(bs*k*dist.get_world_size())   # fastaccum counts the samples of all processes
    else:
        model.register_comm_hook(exchanged, Exchanged.hook)
        acc = FastaiGradientAccumulation(bs*k)   # fastai's callback counts the samples of its own process
    dist.barrier()
    start = time.perf_counter()
    try: learn.fit(1, 1e-3, cbs=acc)
    finally: dist.all_reduce = stock_all_reduce
    return exchanged.nbytes,exchanged.secs,time.perf_counter()-start

def worker(out):
    "Measure in this process; the first process writes KiB and milliseconds per sample to the file `out`"
    torch.set_num_threads(1)
    dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=60))
    arms = {(k,nm):partial(run, k, nm=='fastaccum') for k in ks for nm in ("fastai's callback",'fastaccum')}
    n,rows = bs*n_batches,[]
    for arm,runs in benchmarks.by_turns(arms, rounds).items():
        nbytes,exchange,fit = (median(o)/n for o in zip(*runs))
        rows.append([*arm, f'{nbytes/1024:.1f}', f'{exchange*1e3:.3f}', f'{fit*1e3:.3f}'])
    if not dist.get_rank(): Path(out).write_text(json.dumps(rows))
    dist.destroy_process_group()

def measure(n):
    "Run `n` processes, and return the rows of the first one"
    with tempfile.TemporaryDirectory() as tmp:
        out = Path(tmp)/'rows.json'
        subprocess.run([sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', str(n),
            '-m', 'benchmarks.exchange', '--worker', str(out)], check=True, timeout=600)
        return json.loads(out.read_text())

def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--processes', type=int, default=2)
    parser.add_argument('--worker', help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker: return worker(args.worker)
    head = ['micro-batches per step','','KiB exchanged','ms of exchange','ms in total']
    table = benchmarks.table(head, measure(args.processes))
    made = benchmarks.made(f'{args.processes} processes', f'{os.cpu_count()} cores', 'gloo')
    about = (f'All figures are per sample of a process, as medians of {rounds} rounds, for a model of 1.1 million '
        f'parameters and {n_batches} micro-batches of {bs}. Measured {made}.')
    print(f'{table}\n\n{about}')
    (benchmarks.results/'exchange.md').write_text(f'{table}\n\n{about}\n', encoding='utf-8')

if __name__=='__main__': main()
