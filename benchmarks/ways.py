"""Memory and time of a step on a whole batch, in micro-batches, with a cache and with checkpoints.

Each way trains the same model on the same samples. On a CPU, memory is the peak of the tensors that one step creates
(benchmarks/live.py): activations and gradients, without weights, the batch and internal memory of kernels. Time is
processor time, relative to the whole batch, of the second step of a fit, because some callbacks examine the model in
the first. On a GPU, memory is the peak that torch allocates in addition to the memory in use before, and time is real
time.

`python -m benchmarks.ways [cuda] [--rounds 3]` takes a few minutes. The guide "Out of memory" shows the result.
"""
import argparse, time
import benchmarks
from benchmarks import live
import torch
from functools import partial
from torch import nn
from torch.utils.data import TensorDataset
from torchvision.models import resnet50
from fastai.callback.core import Callback, CancelValidException
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.optimizer import SGD
from fastai.vision.learner import create_vision_model
from fastaccum import ActivationCheckpoint, GradientAccumulation, GradientCache

bs = 32   # samples in a step

class Transformer(nn.Module):
    "A transformer encoder that classifies texts of 64 tokens into ten classes"
    def __init__(self, d=256, n=6):
        super().__init__()
        self.emb = nn.Embedding(1000, d)
        def layer(): return nn.TransformerEncoderLayer(d, 8, 4*d, batch_first=True)
        self.pairs = nn.Sequential(*[nn.Sequential(layer(), layer()) for _ in range(n//2)])
        self.out = nn.Linear(d, 10)
    def forward(self, x): return self.out(self.pairs(self.emb(x)).mean(1))

def vision():
    "Return the model of a `vision_learner` with its stem as one module, inputs, and a list of few, large segments"
    body,head = create_vision_model(resnet50, 10, pretrained=False)
    parts = [body[:4],*body[4:]]
    return nn.Sequential(nn.Sequential(*parts), head),torch.randn(bs, 3, 128, 128),[*parts,head]

def transformer():
    "Return the transformer, inputs, and a list of few, large segments"
    model = Transformer()
    return model,torch.randint(0, 1000, (bs,64)),list(model.pairs)

models = {'resnet50: with fastai\'s head, on 32 images of 128×128 pixels':vision,
    'transformer: 6 layers of width 256, on 32 texts of 64 tokens':transformer}

def ways(few_segments):
    "Return, for each way and its variant, the batch size of the loader and the callbacks"
    res = {('plain','whole batch'):(bs,[])}
    for n in (16,8,4):
        res['split',f'{n}'] = n,[GradientAccumulation(bs)]
        res['cache',f'{n}'] = bs,[GradientCache(micro_batch_size=n)]
    res['checkpoint','coarse'] = bs,[ActivationCheckpoint(few_segments)]
    res['checkpoint','found'] = bs,[ActivationCheckpoint()]
    return res

class Clock(Callback):
    "Records the time at the end of each optimizer step, and skips validation"
    order = -100
    def before_fit(self): self.ends = []
    def after_step(self):
        if self.dls.device.type=='cpu': self.ends.append(time.process_time())
        else:
            torch.cuda.synchronize()
            self.ends.append(time.perf_counter())
    def before_validate(self): raise CancelValidException

def learner(model, x, device):
    ds = TensorDataset(x, torch.randint(0, 10, (len(x),)))
    dls = DataLoaders(DataLoader(ds, bs=bs), DataLoader(ds, bs=bs), device=device)   # validation is skipped
    return benchmarks.quiet(Learner(dls, model.to(device), nn.CrossEntropyLoss(), opt_func=SGD))

def fit(learn, way, steps):
    "Train for `steps` steps; return the seconds of the last one, or None for a single step"
    learn.dls.train.bs,cbs = way
    learn.dls.train.get_idxs = lambda: [*range(bs)]*steps
    learn.dls.train.n = bs*steps
    clock = Clock()
    learn.fit(1, 1e-6, cbs=[clock,*cbs])
    return clock.ends[-1]-clock.ends[-2] if steps>1 else None

def mebibytes(learn, way, device):
    "Return the peak memory of a step in MiB, including gradients"
    fit(learn, way, 1)   # checkpoints examine the inputs of segments in the first step
    for p in learn.model.parameters(): p.grad = None
    return live.peak_bytes(lambda: fit(learn, way, 1), device)/2**20

def measure(make, device, rounds):
    "Return a list of dicts with the memory in MiB and the relative time of each way"
    torch.manual_seed(0)
    model,x,few_segments = make()
    learn,todo = learner(model, x, device),ways(few_segments)
    mibs = {k:mebibytes(learn, o, device) for k,o in todo.items()}
    secs = benchmarks.by_turns({k:partial(fit, learn, o, 2) for k,o in todo.items()}, rounds)
    plain = secs['plain','whole batch']
    return [dict(way=k[0], variant=k[1], mib=round(mibs[k]), time=round(benchmarks.median_ratio(secs[k], plain), 3))
        for k in todo]

def main():
    args = argparse.ArgumentParser()
    args.add_argument('device', nargs='?', default='cpu', type=torch.device)
    args.add_argument('--rounds', type=int, default=3)
    args.add_argument('--note', default=[], nargs='*', help='about the hardware')
    args = args.parse_args()
    found = {nm:measure(make, args.device, args.rounds) for nm,make in models.items()}
    res = dict(made=benchmarks.made(*args.note), models=found)
    benchmarks.save('ways' if args.device.type=='cpu' else f'ways-{args.device.type}', res)
    for nm,rows in found.items():
        print(f"\n{nm}\n\n{benchmarks.table(['','','MiB','time'], [o.values() for o in rows])}")

if __name__=='__main__': main()
