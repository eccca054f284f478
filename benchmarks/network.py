"""When accumulation hides the network: what an exchange takes here, measured, and what it takes elsewhere, worked out.

`python benchmarks/network.py [--processes 2 3] [--out FILE]` launches processes on this machine (gloo) and measures
the time of exchanges of several sizes and of fits with 1 to 16 micro-batches a step. It fits latency and bandwidth to
the first, predicts the second from them, prints both, and writes them to FILE. `step_time` is the arithmetic.
"""
import os
os.environ.setdefault('OMP_NUM_THREADS', '1')
import argparse, datetime, json, platform, sys, time, warnings
from pathlib import Path
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.several import arguments, ended, joined, learner, measured, versions
warnings.filterwarnings('ignore')

# The arithmetic

def exchange_time(nbytes, n, bandwidth, latency):
    """Seconds in which a ring of `n` processes sums `nbytes` bytes, with links of `bandwidth` bytes/s and `latency` s.

    Each process sends 2(n-1) times the n-th part, and waits for its neighbour each time (Patarasuk and Yuan, 2009).
    """
    return 2*(n-1)*(latency + nbytes/n/bandwidth)

def step_time(micro, k, exchange, each=False, hidden=0., opt=0.):
    """Seconds of a step of `k` micro-batches of `micro` s and one exchange of `exchange` s, or `k` of them if `each`,
    and of `opt` s for the optimizer.

    `hidden` is the share of a micro-batch's time during which its exchange goes on beside it: the backward pass
    with DistributedDataParallel is some two thirds; 0 is the most careful answer.
    """
    return opt + k*micro + (k if each else 1)*max(0, exchange - hidden*micro)

def enough(micro, exchange, share=0.05, hidden=0.):
    "The fewest micro-batches in a step with which exchange takes no more than `share` of its time"
    over = max(0, exchange - hidden*micro)
    return max(1, -int(-over*(1-share)/share/micro//1))

# What is measured

kib = (4,16,64,256,1024,4096,16384)
ks,n_steps,rounds,bs,width = (1,2,4,8,16),6,5,16,512

def worker(out):
    "One of the processes: the shortest time of an exchange of each size, and of a step of each fit"
    import torch
    from torch import distributed as dist, nn
    from torch.nn.parallel import DistributedDataParallel
    from fastai.callback.core import Callback
    from fastaccum import GradientAccumulation

    class Clock(Callback):
        "When each step was taken"
        def before_fit(self): self.times = []
        def after_step(self): self.times.append(time.perf_counter())
    def net():
        layers = [nn.Linear(64,width), *(nn.Linear(width,width) for _ in range(3)), nn.Linear(width,10)]
        return nn.Sequential(*(o for lin in layers for o in (lin,nn.ReLU())))
    def step(k, world):
        "Seconds of a step of `k` micro-batches on each process, from one step to the next, at their shortest"
        torch.manual_seed(0)
        data = [(torch.randn(bs,64), torch.randint(10, (bs,))) for _ in range(k*n_steps)]
        model,clock = net() if world==1 else DistributedDataParallel(net()),Clock()
        learner(data, bs, model, [clock,GradientAccumulation(bs*k*world)]).fit(1, 1e-3)
        return min(b-a for a,b in zip(clock.times, clock.times[1:]))
    def steps(world):
        found = [{k: step(k, world) for k in ks} for _ in range(rounds+1)]
        return {k: min(o[k] for o in found[1:]) for k in ks}   # the first round warms up
    def exchange(t, times):
        secs = []
        for _ in range(times):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(t)
            secs.append(time.perf_counter()-start)
        return min(secs)

    torch.set_num_threads(1)
    world = os.environ.pop('WORLD_SIZE')   # or fastaccum would refuse to train beside others without an exchange
    alone = steps(1)
    os.environ['WORLD_SIZE'] = world
    joined(120)
    res = dict(alone=alone, steps=steps(dist.get_world_size()),
               bytes=sum(p.numel()*p.element_size() for p in net().parameters()),
               exchanges={o*1024: exchange(torch.zeros(o*256), 60 if o<4096 else 15) for o in kib})
    ended(res, out)

def measure(n):
    "What the processes found, and the latency (s) and bandwidth (bytes/s) of a link that explain the exchanges best"
    import numpy as np
    res = measured(__file__, n)
    sizes,secs = np.array([int(o) for o in res['exchanges']]),np.array([*res['exchanges'].values()])
    # relative errors count, or the largest exchange would decide alone
    lines = np.stack([np.full_like(secs, 2*(n-1)), 2*(n-1)/n*sizes], 1)/secs[:,None]
    latency,per_byte = np.linalg.lstsq(lines, np.ones_like(secs), rcond=None)[0]
    micro,opt = np.polyfit(*np.array([(int(k),o) for k,o in res['alone'].items()]).T, 1)
    return dict(res, processes=n, latency=float(latency), bandwidth=float(1/per_byte), micro=micro, opt=opt)

def tables(runs):
    "The measurements as two tables: exchanges, and steps beside what the arithmetic says"
    lines = ['| processes | KiB | ms measured | ms by the fitted ring |', '|---|---|---|---|']
    for o in runs:
        for nbytes,secs in o['exchanges'].items():
            by = exchange_time(int(nbytes), o['processes'], o['bandwidth'], o['latency'])
            lines.append(f'| {o["processes"]} | {int(nbytes)//1024:,} | {secs*1e3:.2f} | {by*1e3:.2f} |')
    lines += ['',
              '| processes | micro-batches a step | ms of a step | predicted | predicted, exchange per micro-batch |',
              '|---|---|---|---|---|']
    for o in runs:
        ex = exchange_time(o['bytes'], o['processes'], o['bandwidth'], o['latency'])
        for k,secs in o['steps'].items():
            one,each = (step_time(o['micro'], int(k), ex, each=e, opt=o['opt']) for e in (False,True))
            lines.append(f'| {o["processes"]} | {k} | {secs*1e3:.1f} | {one*1e3:.1f} | {each*1e3:.1f} |')
    return '\n'.join(lines)

def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--processes', type=int, nargs='+', default=[2,3])
    parser.add_argument('--out', type=Path, help='write what was measured to this file')
    args = arguments(parser, f'{os.cpu_count()} cores of an {platform.machine()} CPU')
    if args.worker: return worker(args.worker)
    runs = [measure(n) for n in args.processes]
    made = f'{datetime.date.today()}, {args.hardware}, gloo, {versions()}'
    print(f'{made}\n\n{tables(runs)}')
    if args.out: args.out.write_text(json.dumps(dict(made=made, runs=runs), indent=1)+'\n')

if __name__=='__main__': main()
