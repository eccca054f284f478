"""Samples per second and peak memory on a GPU: fastaccum, fastai's callback, and a bare PyTorch loop that accumulates.

At two model sizes, in fp32, fp16 and bf16; the arms are alternated in one process. `python benchmarks/gpu.py [--out FILE]`
prints a table, and appends it to FILE with date, versions and hardware. Without a GPU it runs a tiny size on the CPU, to try the script.
"""
import argparse, datetime, platform, statistics, time, warnings
from contextlib import nullcontext
from pathlib import Path
warnings.filterwarnings('ignore')

import fastai, torch
from torch import nn
from torch.nn import functional as F
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.progress import ProgressCallback
from fastai.callback.training import GradientAccumulation as FastaiGradientAccumulation
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.optimizer import OptimWrapper
from functools import partial
import fastaccum
from fastaccum import GradientAccumulation

cuda = torch.cuda.is_available()
dev = torch.device('cuda' if cuda else 'cpu')
sizes = dict(small=dict(d=512, layers=6, bs=32, seq=256), large=dict(d=1536, layers=16, bs=16, seq=512)) if cuda else \
    dict(tiny=dict(d=32, layers=2, bs=4, seq=16))
vocab,n_batches,k,rounds = 1024,(32 if cuda else 8),4,5

class Model(nn.Module):
    "A transformer that predicts tokens"
    def __init__(self, d, layers, **_):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.blocks = nn.TransformerEncoder(nn.TransformerEncoderLayer(d, max(1, d//64), 4*d, dropout=0., batch_first=True, norm_first=True), layers)
        self.head = nn.Linear(d, vocab)
    def forward(self, x): return self.head(self.blocks(self.emb(x))).transpose(1, 2)

class Batches(list):
    def __init__(self, xs, bs): super().__init__(xs); self.bs,self.device = bs,dev

def batches(bs, seq, **_): return Batches([(torch.randint(vocab, (bs,seq), device=dev),)*2 for _ in range(n_batches)], bs)

opt_func = partial(OptimWrapper, opt=torch.optim.AdamW)
dtypes = dict(fp32=None, fp16=torch.float16, bf16=torch.bfloat16)

def bare(model, data, precision):
    dtype = dtypes[precision]
    opt,scaler = torch.optim.AdamW(model.parameters(), lr=1e-4),torch.amp.GradScaler(dev.type, enabled=precision=='fp16' and cuda)
    model.train()
    for i,(x,y) in enumerate(data):
        with torch.autocast(dev.type, dtype=dtype) if dtype else nullcontext(): loss = F.cross_entropy(model(x).float(), y)/k
        scaler.scale(loss).backward()
        if (i+1)%k==0:
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()

def fitted(model, data, precision, acc):
    learn = Learner(DataLoaders(data, Batches([], data.bs)), model, nn.CrossEntropyLoss(), opt_func=opt_func)
    learn.remove_cb(ProgressCallback)
    learn.logger = lambda *_: None
    if precision!='fp32' and cuda: learn.add_cb(MixedPrecision(amp_mode=precision))
    learn.fit(1, 1e-4, wd=0.01, cbs=acc)

def timed(f, model):
    "Seconds and peak memory in MiB of `f(model)`"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    start = time.perf_counter()
    f(model)
    if cuda: torch.cuda.synchronize()
    return time.perf_counter()-start,(torch.cuda.max_memory_allocated()/2**20 if cuda else float('nan'))

def measure(size, precision):
    "Samples per second and peak memory of each arm, a list per arm"
    torch.manual_seed(0)
    data,n = batches(**size),size['bs']*n_batches
    def model():
        torch.manual_seed(0)
        return Model(**size).to(dev)
    arms = {'bare PyTorch loop':lambda m: bare(m, data, precision),
        "fastai's callback":lambda m: fitted(m, data, precision, FastaiGradientAccumulation(size['bs']*k)),
        'fastaccum':lambda m: fitted(m, data, precision, GradientAccumulation(size['bs']*k))}
    res = {nm:[] for nm in arms}
    for i in range(rounds+1):
        for nm in list(arms) if i%2 else reversed(arms):
            secs,mem = timed(arms[nm], model())
            if i: res[nm].append((n/secs,mem))   # the first round warms up
    return res

def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--out', type=Path, help='append the table to this file')
    out = parser.parse_args().out
    hardware = torch.cuda.get_device_name() if cuda else f'{platform.machine()} CPU (no GPU: only a trial of the script)'
    lines = [f'## {datetime.date.today()}, {hardware}', '',
        f'fastaccum {fastaccum.__version__}, fastai {fastai.__version__}, torch {torch.__version__}, python {platform.python_version()}; '
        f'{n_batches} micro-batches, {k} a step, {rounds} rounds, medians', '',
        '| model | precision | | ms/micro-batch | samples/s | to the bare loop | peak MiB | to the bare loop |', '|---|---|---|---|---|---|---|---|']
    print('\n'.join(lines), flush=True)
    for nm,size in sizes.items():
        for precision in dtypes:
            res = measure(size, precision)
            ref = res['bare PyTorch loop']
            for arm,runs in res.items():
                rate,mem = (statistics.median(o[i] for o in runs) for i in (0,1))
                to_rate,to_mem = (statistics.median(o[i]/r[i] for o,r in zip(runs, ref)) for i in (0,1))
                lines.append(f'| {nm} | {precision} | {arm} | {size["bs"]/rate*1e3:.1f} | {rate:.0f} | {to_rate:.3f} | {mem:.0f} | {to_mem:.3f} |')
                print(lines[-1], flush=True)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open('a') as f: f.write('\n'.join(lines)+'\n\n')

if __name__=='__main__': main()
