"""Memory against time of the ways to the big batch: plain, split, cached and checkpointed.

Each way trains the same model on the same samples, with the callbacks that users give. On a CPU memory is that of
tensors made by one step, while they are alive (benchmarks/live.py): activations and gradients, not the weights, the
batch, or what kernels take inside. Time is that of the processor, as a ratio to the plain run's; the ways run by turns
in one process, and the median of the ratios is taken. It is that of a fit's second step, since in the first some ways
look at the model. With a GPU, memory is what torch has allocated beyond what was there before, and time is the clock's.

`python benchmarks/ways.py [cuda] [--rounds 3]` writes `benchmarks/results/ways.json` (`ways-cuda.json`), prints
the tables, and writes them beside it; some minutes.
"""
import os, sys
os.environ.setdefault('OMP_NUM_THREADS', '1')
import argparse, json, platform, time, warnings
from datetime import date
from pathlib import Path
from statistics import median
root = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(root))
warnings.filterwarnings('ignore')
import fastai, torch
from torch import nn
from torch.utils.data import TensorDataset
from torchvision.models import resnet50
from fastai.callback.core import Callback, CancelValidException
from fastai.callback.progress import ProgressCallback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.optimizer import SGD
from fastai.vision.learner import create_vision_model
from fastcore.basics import noop
import fastaccum
from fastaccum import ActivationCheckpoint, GradientAccumulation, GradientCache
from benchmarks.live import megabytes

bs = 32   # samples in a step
ways = 'plain','split','cache','checkpoint'

# Models and data

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
    "A `vision_learner`'s model, whose stem is one module as the stages are"
    body,head = create_vision_model(resnet50, 10, pretrained=False)
    return nn.Sequential(nn.Sequential(body[:4], *body[4:]), head),torch.randn(bs, 3, 128, 128)
def transformer(): return Transformer(),torch.randint(0, 1000, (bs,64))
models = {'resnet50 with fastai\'s head, 32 images of 128 pixels':vision,
    'transformer of 6 layers of 256, 32 texts of 64 tokens':transformer}

def coarse(model):
    "Half as many segments as are found, or fewer"
    if isinstance(model, Transformer): return list(model.pairs)
    body,head = model
    return [*body,head]

def arms(model):
    "Of each way and variant: samples in the loader's batch, and the callbacks"
    res = {('plain','whole batch'):(bs,[])}
    for n in (16,8,4):
        res['split',f'{n}'] = n,[GradientAccumulation(bs)]
        res['cache',f'{n}'] = bs,[GradientCache(micro_batch_size=n)]
    res['checkpoint','coarse'] = bs,[ActivationCheckpoint(coarse(model))]
    res['checkpoint','found'] = bs,[ActivationCheckpoint()]
    return res

# Measuring

class Clock(Callback):
    "Seconds of the last optimizer step and what led to it; no validation"
    order = -100
    def __init__(self, device): self.now = time.process_time if device.type=='cpu' else self.synced
    def synced(self):
        torch.cuda.synchronize()
        return time.perf_counter()
    def before_fit(self): self.ends = []
    def after_step(self): self.ends.append(self.now())
    def before_validate(self): raise CancelValidException
    @property
    def secs(self): return self.ends[-1]-self.ends[-2]

def learner(model, x, device):
    y = torch.randint(0, 10, (len(x),))
    train,valid = TensorDataset(x, y),TensorDataset(x[:2], y[:2])
    dls = DataLoaders(DataLoader(train, bs=bs), DataLoader(valid, bs=2), device=device)
    learn = Learner(dls, model.to(device), nn.CrossEntropyLoss(), opt_func=SGD)
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return learn

def run(learn, arm, device, steps=1):
    "A fit of so many steps, and its clock"
    learn.dls.train.bs,cbs = arm
    learn.dls.train.get_idxs = lambda: [*range(bs)]*steps
    learn.dls.train.n = bs*steps
    clock = Clock(device)
    learn.fit(1, 1e-6, cbs=[clock,*cbs])
    return clock

def memory(learn, arm, device):
    "MB of a step at its peak, gradients and all"
    run(learn, arm, device)   # segments look at their inputs
    for p in learn.model.parameters(): p.grad = None
    return megabytes(lambda: run(learn, arm, device), device)

def measure(make, device, rounds):
    "MB and times of each arm"
    torch.manual_seed(0)
    model,x = make()
    learn = learner(model, x, device)
    todo = arms(model)
    mbs,secs = {k:memory(learn, o, device) for k,o in todo.items()},{k:[] for k in todo}
    for _ in range(rounds):
        for k,o in todo.items(): secs[k].append(run(learn, o, device, 2).secs)   # the first step of a fit looks around
    plain = secs['plain','whole batch']
    return [dict(way=k[0], variant=k[1], mb=round(mbs[k]), time=round(median(a/b for a,b in zip(secs[k], plain)), 3))
        for k in todo]

# What came of it

names = dict(plain='the big batch', split='`GradientAccumulation(32)`, micro-batches of',
    cache='`GradientCache`, micro-batches of', checkpoint='`ActivationCheckpoint`, segments:')

def table(rows):
    "A Markdown table of a model's arms"
    def name(o): return names[o['way']]+('' if o['way']=='plain' else f" {o['variant']}")
    lines = [f"| {name(o)} | {o['mb']} | {o['time']:.2f} |" for o in rows]
    return '\n'.join(['| | MB | time |','|---|---|---|',*lines])

def report(res):
    return '\n\n'.join([f"Made {res['made']}.", *(f'{nm}:\n\n{table(rows)}' for nm,rows in res['models'].items())])

def main():
    args = argparse.ArgumentParser()
    args.add_argument('device', nargs='?', default='cpu')
    args.add_argument('--rounds', type=int, default=3)
    args.add_argument('--note', default='', help='about the hardware')
    args = args.parse_args()
    device = torch.device(args.device)
    hardware = platform.machine() if device.type=='cpu' else torch.cuda.get_device_name()
    versions = f'fastaccum {fastaccum.__version__}, fastai {fastai.__version__}, torch {torch.__version__}'
    made = f'{date.today()}, {hardware}{args.note and ", "+args.note}, {versions}, python {platform.python_version()}'
    res = dict(made=made, models={nm:measure(make, device, args.rounds) for nm,make in models.items()})
    out = root/'benchmarks/results'/('ways' if device.type=='cpu' else f'ways-{device.type}')
    out.with_suffix('.json').write_text(json.dumps(res, indent=1)+'\n')
    out.with_suffix('.md').write_text(report(res)+'\n')
    print(report(res))

if __name__=='__main__': main()
