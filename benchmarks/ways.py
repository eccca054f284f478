"""Memory and time of the ways to the full batch: whole, in micro-batches, cached and checkpointed.

Each way trains the same model on the same samples, with the callbacks that users give. On a CPU memory is that of
tensors made by one step, while they are alive (benchmarks/live.py): activations and gradients, not the weights, the
batch, or what kernels take inside. Time is that of the processor, as a ratio to that of the whole batch. It is that of
a fit's second step, since in the first some ways look at the model. With a GPU, memory is what torch has allocated
beyond what was there before, and time is the clock's.

`python -m benchmarks.ways [cuda] [--rounds 3]` takes some minutes. The guide "Out of memory" shows the result.
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
    "An encoder that tells one of ten classes from 64 tokens"
    def __init__(self, d=256, n=6):
        super().__init__()
        self.emb = nn.Embedding(1000, d)
        def layer(): return nn.TransformerEncoderLayer(d, 8, 4*d, batch_first=True)
        self.pairs = nn.Sequential(*[nn.Sequential(layer(), layer()) for _ in range(n//2)])
        self.out = nn.Linear(d, 10)
    def forward(self, x): return self.out(self.pairs(self.emb(x)).mean(1))

def vision():
    "A `vision_learner`'s model, whose stem is one module as the stages are; inputs; and few segments to cut it into"
    body,head = create_vision_model(resnet50, 10, pretrained=False)
    parts = [body[:4],*body[4:]]
    return nn.Sequential(nn.Sequential(*parts), head),torch.randn(bs, 3, 128, 128),[*parts,head]

def transformer():
    "The transformer; inputs; and few segments to cut it into"
    model = Transformer()
    return model,torch.randint(0, 1000, (bs,64)),list(model.pairs)

models = {'resnet50 with fastai\'s head, 32 images of 128 pixels':vision,
    'transformer of 6 layers of 256, 32 texts of 64 tokens':transformer}

def ways(few_segments):
    "Of each way and its variant: samples in the loader's batch, and the callbacks"
    res = {('plain','whole batch'):(bs,[])}
    for n in (16,8,4):
        res['split',f'{n}'] = n,[GradientAccumulation(bs)]
        res['cache',f'{n}'] = bs,[GradientCache(micro_batch_size=n)]
    res['checkpoint','coarse'] = bs,[ActivationCheckpoint(few_segments)]
    res['checkpoint','found'] = bs,[ActivationCheckpoint()]
    return res

class Clock(Callback):
    "Notes the time at the end of each optimizer step, and skips validation"
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
    "Train for so many steps; returns the seconds of the last step"
    learn.dls.train.bs,cbs = way
    learn.dls.train.get_idxs = lambda: [*range(bs)]*steps
    learn.dls.train.n = bs*steps
    clock = Clock()
    learn.fit(1, 1e-6, cbs=[clock,*cbs])
    return clock.ends[-1]-clock.ends[-2] if steps>1 else None

def megabytes(learn, way, device):
    "MB of a step at its peak, gradients and all"
    fit(learn, way, 1)   # segments look at their inputs
    for p in learn.model.parameters(): p.grad = None
    return live.peak_bytes(lambda: fit(learn, way, 1), device)/1e6

def measure(make, device, rounds):
    "MB and times of each way"
    torch.manual_seed(0)
    model,x,few_segments = make()
    learn,todo = learner(model, x, device),ways(few_segments)
    mbs = {k:megabytes(learn, o, device) for k,o in todo.items()}
    secs = benchmarks.by_turns({k:partial(fit, learn, o, 2) for k,o in todo.items()}, rounds)
    plain = secs['plain','whole batch']
    return [dict(way=k[0], variant=k[1], mb=round(mbs[k]), time=round(benchmarks.median_ratio(secs[k], plain), 3))
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
        print(f"\n{nm}\n\n{benchmarks.table(['','','MB','time'], [o.values() for o in rows])}")

if __name__=='__main__': main()
