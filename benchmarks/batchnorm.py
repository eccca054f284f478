"""The effect of BatchNorm on runs on micro-batches, and the remedies: the table of the guide "BatchNorm".

A resnet18 classifies crops of 32 pixels by the region of two photographs from scikit-learn. Steps have 64 crops, in
micro-batches of 64 (the full batch), 16, 8 and 4 when trained from scratch, and of 64, 16 and 8 when fine-tuned. The
model for fine-tuning was pretrained to tell by which angle crops of the photographs are rotated. The table shows the
validation loss for each seed: as trained, with running statistics recalibrated on batches of 64, with statistics frozen
during training, and with GroupNorm instead of BatchNorm. Crops for validation differ from those for training, but are
of the same photographs.

`python -m benchmarks.batchnorm` takes about 20 minutes on one core; with `--jobs 2` it trains two seeds at a time.
"""
import argparse
from multiprocessing import get_context
import numpy as np, torch
from functools import partial
from sklearn.datasets import load_sample_images
from torch import nn
from torch.utils.data import TensorDataset
from torchvision.models import resnet18
from fastai.callback.schedule import Learner   # this import adds fit_one_cycle
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.losses import CrossEntropyLossFlat
from fastai.torch_core import set_seed
from fastaccum import FreezeBN, GradientAccumulation
from benchmarks import made, quiet, save

step,px,n_train,n_valid,n_epoch,lr = 64,32,1024,512,6,3e-3
sizes = {'from scratch':(64,16,8,4), 'fine-tuning':(64,16,8)}

def crops(n, turned, rng):
    "Return crops of the photographs with the region (of 6 in each) or, if `turned`, the number of quarter turns"
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
    "Return a Learner with a new resnet18"
    rng = np.random.default_rng(seed)
    train,valid = (crops(n, turned, rng) for n in (n_train,n_valid))
    set_seed(seed)
    dls = DataLoaders(DataLoader(train, bs=bs, shuffle=True), DataLoader(valid, bs=256))
    return quiet(Learner(dls, resnet18(num_classes=12, norm_layer=norm_layer), CrossEntropyLossFlat()))

def pretrained(seed):
    "Return the weights of a model that has learned, on full batches, how crops are rotated"
    learn = learner(step, turned=True, seed=100+seed)
    learn.fit_one_cycle(8, 3e-3)
    return {k:v.clone() for k,v in learn.model.state_dict().items() if not k.startswith('fc')}

def train(bs, seed, start, cbs=(), **kwargs):
    "Train on micro-batches of `bs`, from the weights `start` unless None, and return the Learner"
    learn = learner(bs, seed=seed, **kwargs)
    if start is not None: learn.model.load_state_dict(start, strict=False)
    learn.fit_one_cycle(n_epoch, lr, cbs=[GradientAccumulation(step), *cbs])
    return learn

def loss(learn): return round(learn.validate()[0], 3)

def run(seed):
    "Return the validation losses from scratch and fine-tuned, for each size of micro-batches"
    torch.set_num_threads(1)
    res = {}
    for kind,start in {'from scratch':None, 'fine-tuning':pretrained(seed)}.items():
        for bs in sizes[kind]:
            learn = train(bs, seed, start)
            found = {'as trained':loss(learn)}
            learn.recalibrate_bn(step)
            found[f'recalibrated on {step}'] = loss(learn)
            if start is not None: found['frozen'] = loss(train(bs, seed, start, [FreezeBN()]))
            elif bs==16: found['GroupNorm'] = loss(train(bs, seed, start, norm_layer=partial(nn.GroupNorm, 32)))
            res.setdefault(kind, {})[str(bs)] = found
            print(f'seed {seed}, {kind}, {bs}:', found, flush=True)
    return res

def main():
    args = argparse.ArgumentParser()
    args.add_argument('--seeds', type=int, default=2)
    args.add_argument('--jobs', type=int, default=1, help='processes')
    args = args.parse_args()
    with get_context('spawn').Pool(args.jobs) as pool: seeds = pool.map(run, range(args.seeds), chunksize=1)
    save('batchnorm', dict(made=made(f'{args.seeds} seeds'), seeds=seeds))

if __name__=='__main__': main()
