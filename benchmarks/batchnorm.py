"""What BatchNorm does to runs on micro-batches, and what helps: the table of the guide "BatchNorm".

A resnet18 tells the regions of two photographs, which come with scikit-learn, by crops of 32 pixels. Steps are of 64
crops, in micro-batches of 64 (the big batch), 16, 8 and 4 from scratch, and of 64, 16 and 8 fine-tuned after it has
learned to say how crops of the photographs are turned. Validation loss is a mean over seeds: as trained, with the
running statistics estimated anew (on micro-batches, and on batches of 64), and with statistics that are frozen while
training. Crops for validation are others than those for training, of the same photographs.
`python benchmarks/batchnorm.py` prints a Markdown table and writes `benchmarks/results/batchnorm.json`, in some
20 minutes of one core; `--jobs 2` trains two seeds at once.
"""
import os
os.environ.setdefault('OMP_NUM_THREADS', '1')
import argparse, json, platform
from datetime import date
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
import fastai, numpy as np, torch
from sklearn.datasets import load_sample_images
from torch import nn
from torch.utils.data import TensorDataset
from torchvision.models import resnet18
from fastai.callback.progress import ProgressCallback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.torch_core import set_seed
from fastaccum import FreezeBN, GradientAccumulation

step,px,n_train,n_valid,n_epoch,lr = 64,32,1024,512,6,3e-3
sizes = {'from scratch':(64,16,8,4), 'fine-tuning':(64,16,8)}
out = Path(__file__).parent/'results'/'batchnorm.json'

def crops(n, turned, rng):
    "Crops of the photographs, and the region (of 6 in each) they are from, or the quarters by which they are turned"
    photos = [torch.tensor(o).permute(2, 0, 1)/255. for o in load_sample_images().images]
    xs,ys = [],[]
    for _ in range(n):
        i,region = rng.integers(len(photos)),rng.integers(6)
        _,h,w = photos[i].shape
        h,w = h//2,w//3
        top = (region//3)*h+rng.integers(h-px)
        left = (region%3)*w+rng.integers(w-px)
        x,turn = photos[i][:,top:top+px,left:left+px],rng.integers(4)
        xs.append(torch.rot90(x, turn, (1,2)) if turned else x)
        ys.append(turn if turned else 6*i+region)
    x = torch.stack(xs)
    return TensorDataset((x-0.45)/0.25, torch.tensor(np.array(ys)))

def learner(bs, turned=False, seed=0, norm_layer=None):
    "A Learner with a fresh resnet18"
    rng = np.random.default_rng(seed)
    train,valid = (crops(n, turned, rng) for n in (n_train,n_valid))
    set_seed(seed)
    dls = DataLoaders(DataLoader(train, bs=bs, shuffle=True), DataLoader(valid, bs=256))
    learn = Learner(dls, resnet18(num_classes=12, norm_layer=norm_layer), CrossEntropyLossFlat())
    learn.remove_cb(ProgressCallback)
    return learn

def pretrained(seed):
    "What a model has learned of how crops are turned, with the big batch"
    learn = learner(step, turned=True, seed=100+seed)
    with learn.no_logging(): learn.fit_one_cycle(8, 3e-3)
    return {k:v.clone() for k,v in learn.model.state_dict().items() if not k.startswith('fc')}

def train(bs, seed, start, cbs=(), **kwargs):
    learn = learner(bs, seed=seed, **kwargs)
    if start is not None: learn.model.load_state_dict(start, strict=False)
    with learn.no_logging(): learn.fit_one_cycle(n_epoch, lr, cbs=[GradientAccumulation(step), *cbs])
    return learn

def loss(learn, bs=None):
    "Validation loss, perhaps with statistics of batches of `bs`"
    if bs is not None: learn.recalibrate_bn(bs)
    with learn.no_logging(): return learn.validate()[0]

def run(seed):
    "Validation losses: of from scratch and fine-tuning, for each size of the micro-batches"
    torch.set_num_threads(1)
    res = {}
    for kind,start in {'from scratch':None, 'fine-tuning':pretrained(seed)}.items():
        for bs in sizes[kind]:
            learn = train(bs, seed, start)
            found = {'as trained':loss(learn)} | {f'recalibrated on {o}':loss(learn, o) for o in (bs,step)}
            if start is not None: found['frozen'] = loss(train(bs, seed, start, [FreezeBN()]))
            elif bs==16: found['GroupNorm'] = loss(train(bs, seed, start, norm_layer=partial(nn.GroupNorm, 32)))
            found = {k:round(v, 3) for k,v in found.items()}
            res.setdefault(kind, {})[str(bs)] = found
            print(f'seed {seed}, {kind}, {bs}:', found, flush=True)
    return res

def report(res):
    "A Markdown table of the losses' means over seeds"
    rows = ['| | micro-batches of | as trained | recalibrated on micro-batches | recalibrated on 64 | frozen |',
            '|---|---|---|---|---|---|']
    for kind in res['seeds'][0]:
        for bs in map(str, sizes[kind]):
            def cell(nm):
                vals = [o[kind][bs].get(nm) for o in res['seeds']]
                return '' if None in vals else f'{mean(vals):.3f}'
            what = f'{bs} (the big batch)' if bs==str(step) else bs
            cells = [cell(nm) for nm in ('as trained',f'recalibrated on {bs}',f'recalibrated on {step}','frozen')]
            if bs==str(step): cells[1] = ''
            rows.append(f"| {kind} | {what} | {' | '.join(cells)} |")
    return '\n'.join(rows)

def main():
    args = argparse.ArgumentParser()
    args.add_argument('--seeds', type=int, default=2)
    args.add_argument('--jobs', type=int, default=1, help='processes')
    args = args.parse_args()
    with get_context('spawn').Pool(args.jobs) as pool: seeds = pool.map(run, range(args.seeds), chunksize=1)
    versions = f'python {platform.python_version()}, torch {torch.__version__}, fastai {fastai.__version__}'
    made = f'{date.today()}, {args.seeds} seeds; {platform.machine()}; {versions}'
    res = dict(made=made, seeds=seeds)
    out.write_text(json.dumps(res, indent=1)+'\n')
    print(report(res))

if __name__=='__main__': main()
