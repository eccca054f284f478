"""What `NoiseScale` adds to the time of a micro-batch.

`python benchmarks/noise.py`: first two methods of measuring the length of a micro-batch's gradient, a hook on each
parameter and the difference of copies. Then fits with and without `NoiseScale`, alternated in one process, because
machines are noisy; medians are printed.
It is processor time of one thread. With `cuda` as argument: on the GPU, on the clock.
"""
import os
os.environ.setdefault('OMP_NUM_THREADS', '1')
import statistics, sys, time, warnings
warnings.filterwarnings('ignore')

import torch
from torch import nn
from torch.nn import functional as F
from torchvision.models import resnet18
from fastai.callback.progress import ProgressCallback
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.optimizer import SGD
from fastaccum import GradientAccumulation, NoiseScale

device = torch.device(sys.argv[1] if len(sys.argv)>1 else 'cpu')
cuda = device.type=='cuda'
torch.set_num_threads(1)

def seconds(f):
    if cuda: torch.cuda.synchronize()
    clock = time.perf_counter if cuda else time.process_time
    t = clock()
    f()
    if cuda: torch.cuda.synchronize()
    return clock()-t

def tiny(): return nn.Sequential(nn.Linear(10,16), nn.ReLU(), nn.Linear(16,3))

# model, shape of a sample, samples in a micro-batch; micro-batches in an epoch (of tens of steps), and in a step
models = {'two linear layers':(tiny,(10,),16,800,8), 'resnet18, 64 px':(resnet18,(3,64,64),16,20,2)}
if cuda: models = {'two linear layers':(tiny,(10,),16,800,8), 'resnet18, 128 px':(resnet18,(3,128,128),32,160,8)}

class Batches(list):
    "Ready-made batches, so that loading costs nothing"
    def __init__(self, o, bs):
        super().__init__(o)
        self.bs,self.device = bs,device

def ways(make, shape, bs):
    "Milliseconds of a micro-batch, alone and with either way to the length of its gradient"
    model,x = make().to(device),torch.randn(bs, *shape, device=device)
    ps,lengths = list(model.parameters()),[]
    def run(): model(x).square().mean().backward()
    def copies():
        old = [p.grad.clone() for p in ps]
        run()
        lengths.extend(torch._foreach_norm(torch._foreach_sub([p.grad for p in ps], old)))
    def hooks():
        handles = [p.register_hook(lambda g: lengths.append(torch.linalg.vector_norm(g))) for p in ps]
        run()
        for o in handles: o.remove()
    run()
    times = {f:[] for f in (run,copies,hooks)}
    for _ in range(200 if make is tiny else 9):
        for f in times:
            lengths.clear()
            times[f].append(seconds(f)*1e3)
    return [statistics.median(o) for o in times.values()]

def fits(make, shape, bs, n, k):
    "Milliseconds per micro-batch of fits without the meter and with it, on every tenth step and on every step"
    data = Batches([(torch.randn(bs, *shape, device=device), torch.randint(0, 3, (bs,), device=device))
        for _ in range(min(n, 40))]*(n//min(n, 40)), bs)
    learn = Learner(DataLoaders(data, Batches([], bs), device=device), make(), F.cross_entropy, opt_func=SGD)
    learn.remove_cb(ProgressCallback)
    learn.logger = lambda *_: None
    learn.validate = None
    def fit(*cbs): return lambda: learn.fit(1, 1e-3, cbs=[GradientAccumulation(bs*k), *cbs])
    arms = [fit(),lambda: fit(NoiseScale())(),lambda: fit(NoiseScale(every=1))()]
    for f in arms: f()
    times = [[] for _ in arms]
    for i in range(9):
        for j in range(3)[::1 if i%2 else -1]: times[j].append(seconds(arms[j])/n*1e3)
    more = [statistics.median((b-a)/a for a,b in zip(times[0], o)) for o in times[1:]]
    return statistics.median(times[0]),more

for nm,(make,shape,bs,n,k) in models.items():
    run,copies,hooks = ways(make, shape, bs)
    print(f'{nm}, micro-batches of {bs}, {device.type}')
    print(f'  a micro-batch {run:.3g} ms; with a difference of copies {copies/run-1:+.1%}, '
        f'with hooks {hooks/run-1:+.1%}')
    alone,(tenth,each) = fits(make, shape, bs, n, k)
    print(f'  in a fit {alone:.3g} ms; with NoiseScale() {tenth:+.1%}, with every=1 {each:+.1%}', flush=True)
