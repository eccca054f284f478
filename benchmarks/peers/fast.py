"""What a micro-batch costs with each peer.

All arms run in one process, by turns. The model notes the time of each forward pass; the time from one to the one
16 later is what is measured, so what a Trainer does before and after a fit does not count. It is processor time:
all work is done in one thread, so on a quiet machine that is the time on the clock, and on a busy one it is
disturbed less."""
import importlib, os, time
from functools import partial
from statistics import median
from unittest.mock import patch
import torch
from torch import nn
from torch.utils.data import DataLoader
from .. import by_turns, made, median_ratio
from .cases import Case

arms = [('bare','Bare'),('accelerate','Accumulate'),('lightning','Lightning'),('transformers','NumItems'),
    ('fastai','Plain'),('fastai','Fastai'),('fastxtend','KeepLast'),('fastaccum','Fastaccum')]
variable = 'PYTORCH_NVML_BASED_CUDA_CHECK'   # set by importing Lightning; see lightning.py

def load(modules):
    "The classes of the arms, by key; the bare loop is always among them, to compare with"
    names = [(mod,nm) for mod,nm in arms if mod in modules or mod=='bare']
    classes = [getattr(importlib.import_module(f'.{mod}', __package__), nm) for mod,nm in names]
    return {o.key:o for o in classes}

# Models

class Noted:
    "A model that notes when its forward passes begin"
    now = staticmethod(time.process_time)
    def forward(self, x):
        self.stamps.append(self.now())
        return super().forward(x)

class Tiny(Noted, nn.Sequential):
    "So small that little but the host's work is left"
    def __init__(self): super().__init__(nn.Linear(10,16), nn.ReLU(), nn.Linear(16,3))
    @staticmethod
    def batch(bs): return torch.randn(bs, 10),torch.randint(3, (bs,))

class Transformer(Noted, nn.Sequential):
    "A small transformer that predicts tokens"
    def __init__(self, d=64, layers=2):
        blocks = [nn.TransformerEncoderLayer(d, 4, 4*d, dropout=0., batch_first=True) for _ in range(layers)]
        super().__init__(nn.Embedding(128, d), *blocks, nn.Linear(d, 128))
    @staticmethod
    def batch(bs, seq=32): return (torch.randint(128, (bs,seq)),)*2

# Data

class Loader(DataLoader):
    "Batches that are ready, so that loading costs next to nothing"
    def __init__(self, batches, bs):
        super().__init__(batches, batch_size=None)
        self.bs,self.device = bs,batches[0]['labels' if isinstance(batches[0], dict) else 1].device

class Ready:
    "Data as the peers want it"
    def __init__(self, batches, bs): self.batches,self.bs = batches,bs
    def __len__(self): return len(self.batches)*self.bs
    def loader(self, bs, collate_fn=None):
        if collate_fn is None: return Loader(self.batches, bs)
        return Loader([dict(x=x, labels=y) for x,y in self.batches], bs)

# Measuring

def fit(peer_cls, model, batches, k, bs, **kwargs):
    "Train for one epoch on `batches`; `model.stamps` has the times of its forward passes then"
    case = Case('fast', '', kind='fast', micro=bs, accum=bs*k, n=bs*len(batches), epochs=1, lr=1e-3, mom=0., **kwargs)
    peer,model.stamps = peer_cls(),[]
    peer.start(case, model)
    peer.fit(Ready(batches, bs), 1, bs, bs*k)

def microseconds(peer_cls, make, k, n_batches, bs=16):
    "Microseconds of a micro-batch, in the fastest of the blocks of 16: what else runs on the machine only ever adds"
    torch.manual_seed(0)
    model = make()
    fit(peer_cls, model, [model.batch(bs) for _ in range(n_batches)], k, bs)
    s,block = model.stamps,16
    assert len(s)==n_batches, f'{peer_cls.title}: {len(s)} forward passes for {n_batches} micro-batches'
    return min(s[i+block]-s[i] for i in range(block, len(s)-block, block))/block*1e6   # the first block warms up

def compare(classes, make, rounds, **kwargs):
    "Of each arm the medians over the rounds: microseconds of a micro-batch, and the ratio to the bare loop"
    found = by_turns({nm:partial(microseconds, o, make, **kwargs) for nm,o in classes.items()}, rounds)
    return {nm:dict(us=round(median(o), 1), to_bare=round(median_ratio(o, found['bare']), 3)) for nm,o in found.items()}

def with_variable(cls):
    "The arm in a process that has imported Lightning: with the variable that the import sets"
    class WithVariable(cls):
        def fit(self, *args):
            with patch.dict(os.environ, {variable:'1'}): super().fit(*args)
    return WithVariable

def run_fast(names, note=()):
    "Everything; some minutes"
    torch.set_num_threads(1)
    classes = load(names)
    assert variable not in os.environ, f'{variable} is set: the arms that use fastai would pay for it'
    res = dict(made=made(*note), arms={nm:o.title for nm,o in classes.items()}, cost={})
    for nm,make,n_batches,rounds in (('tiny',Tiny,400,7),('transformer',Transformer,80,5)):
        for k in (1,4,16):
            print(f'a {nm} model, {k} micro-batches per step', flush=True)
            for arm,o in compare(classes, make, rounds, k=k, n_batches=n_batches).items():
                res['cost'].setdefault(nm, {}).setdefault(arm, {})[str(k)] = o
    print(f'with {variable}', flush=True)
    fastais = {nm:o for nm,o in classes.items() if nm in ('bare','lightning','fastai-plain','fastai','fastaccum')}
    both = fastais|{f'{nm}+':with_variable(o) for nm,o in fastais.items()}
    found = compare(both, Tiny, 7, k=4, n_batches=400)
    res['lightning'] = {nm:dict(without=found[nm]['us'], set=found[f'{nm}+']['us']) for nm in fastais}
    return res
