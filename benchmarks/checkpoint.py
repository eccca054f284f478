"""What checkpointing saves and what it costs: memory held by a forward and a backward pass, and their time, for a
vision_learner's model cut into more or fewer segments.

Memory is that of the tensors alive, with their gradients, counted on a CPU (benchmarks/live.py), for a batch of 32
at 128 pixels. Times are ratios to the plain pass, of processor time, with 8 samples; the arms are alternated in one
process, and the median is taken, because machines are noisy. `python benchmarks/checkpoint.py`

With a GPU: `python benchmarks/checkpoint.py cuda` measures memory and time there, with and without `offload`.
"""
import os, sys
os.environ.setdefault('OMP_NUM_THREADS', '1')
import statistics, time, warnings
warnings.filterwarnings('ignore')
from pathlib import Path
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch.nn import functional as F
from torchvision.models import resnet18, resnet50
from fastai.vision.learner import create_vision_model
from fastaccum.checkpoint import _Chain, _Recomputed
from fastaccum.core.segments import Segment, find_segments
from benchmarks.live import megabytes

bs,px,rounds = 32,128,5
device = torch.device(sys.argv[1] if len(sys.argv)>1 else 'cpu')

def pairs(body):
    "The blocks of each stage two by two"
    return [(stage,i,i+2) for stage in list(body)[4:] for i in range(0, len(stage), 2)]

def cuts(model):
    "How a model is cut: modules, and parts of a Sequential"
    body,head = model
    stem = body,0,4
    return {'not at all':None, 'body, head':[body,head], 'stem, stages, head':[stem,*list(body)[4:],head],
        'stem, pairs of blocks, head':[stem,*pairs(body),head],
        'blocks only':[b for stage in list(body)[4:] for b in stage], 'stem, blocks, head (found)':'found'}

class placed:
    "The segments in their place"
    def __init__(self, model, given, offload=False):
        cuts = find_segments(model) if given=='found' else [self.segment(o) for o in given or ()]
        self.segments = [_Recomputed(o, offload) for o in cuts]
        chains = [_Chain(seq, self.segments) for seq in {o.seq:0 for o in cuts if o.seq is not None}]
        self.places = [o.place for o in (*self.segments,*chains) if o.place is not None]
    def segment(self, o):
        if not isinstance(o, tuple): return Segment(type(o).__name__, [o])
        seq,i,j = o
        return Segment(f'[{i}:{j}]', list(seq)[i:j], seq)
    def __enter__(self):
        for o in self.places: o.enter()
        return self
    def __exit__(self, *_):
        for o in self.places: o.leave()

def step(model, x, y):
    for p in model.parameters(): p.grad = None
    F.cross_entropy(model(x), y).backward()

def batch(n): return torch.randn(n, 3, px, px, device=device),torch.randint(0, 10, (n,), device=device)

def memory(model, x, y):
    "MB at the peak of a step, without the weights"
    for _ in range(2): step(model, x, y)   # in the first, the segments look at their inputs
    for p in model.parameters(): p.grad = None
    return megabytes(lambda: step(model, x, y), device)

def seconds(model, x, y):
    if device.type=='cpu':
        start = time.process_time()
        step(model, x, y)
        return time.process_time()-start
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(5): step(model, x, y)
    torch.cuda.synchronize()
    return time.perf_counter()-start

def measure(arch):
    torch.manual_seed(0)
    model = create_vision_model(arch, 10, pretrained=False).to(device).train()
    offloads = (False,) if device.type=='cpu' else (False,True)
    arms = {(how,o):placed(model, given, o) for how,given in cuts(model).items() for o in offloads
        if given is not None or not o}
    x,y = batch(bs)
    mems,times = {},{k:[] for k in arms}
    for k,o in arms.items():
        with o: mems[k] = memory(model, x, y)
    if device.type=='cpu': x,y = batch(8)
    for _ in range(rounds):
        for k,o in arms.items():
            with o: times[k].append(seconds(model, x, y))
    plain = statistics.median(times['not at all',False])
    print(f'\n{arch.__name__}, batch of {bs} at {px} px\n\n| cut into | segments | MB | time |\n|---|---|---|---|')
    for (how,offload),o in arms.items():
        print(f"| {how}{', offloaded' if offload else ''} | {len(o.segments)} | {mems[how,offload]:.0f} | "
            f"{statistics.median(times[how,offload])/plain:.2f} |", flush=True)
    x,y = batch(bs//4)
    for how in ('not at all','stem, blocks, head (found)'):
        with arms[how,False]: mb = memory(model, x, y)
        print(f'micro-batches of {bs//4}, cut into {how}: {mb:.0f} MB', flush=True)

if __name__=='__main__':
    for arch in (resnet18,resnet50): measure(arch)
