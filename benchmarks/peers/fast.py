"""What a micro-batch costs with each peer: time on the host, samples per second, peak memory, and how they grow.

All arms run in one process, by turns. The model notes the time of each forward pass; the time from one to the one
16 later is what is measured, so what a Trainer does before and after a fit does not count. It is processor time:
all work is done in one thread, so on a quiet machine that is the time on the clock, and on a busy one it is
disturbed less. Memory is that of the tensors alive, counted, so it is the same in each run."""
import importlib, statistics, time, torch
from torch import nn
from torch.utils.data import DataLoader
from ..live import LiveTensors
from .cases import Case

arms = [('bare','Bare'),('accelerate','Accumulate'),('lightning','Lightning'),
        ('transformers','NumItems'),('fastai','Plain'),
        ('fastai','Fastai'),('fastxtend','KeepLast'),('fastaccum','Fastaccum')]
with_callbacks = {'lightning','transformers','fastai','fastxtend','fastaccum'}   # modules of those that have callbacks

def load_one(mod, nm): return getattr(importlib.import_module(f'.{mod}', __package__), nm)

def load(names):
    "The classes of the arms, by key; the bare loop is always among them, to compare with"
    res = [load_one(mod, nm) for mod,nm in arms if mod in names or mod=='bare']
    return {o.key:o for o in res}

class Noted:
    "A model that notes when its forward passes begin"
    def forward(self, x):
        self.stamps.append(time.process_time())
        return super().forward(x)

class Tiny(Noted, nn.Sequential):
    "So small that little but the host's work is left; `n` layers, each with two parameter tensors"
    def __init__(self, n=2):
        super().__init__(nn.Linear(10,16), nn.ReLU(), *(nn.Linear(16,16) for _ in range(n-2)), nn.Linear(16,3))
    @staticmethod
    def batch(bs): return torch.randn(bs, 10),torch.randint(3, (bs,))

class Conv(Noted, nn.Sequential):
    "A small convolutional network"
    def __init__(self):
        super().__init__(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GroupNorm(4, 32), nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(64, 10))
    @staticmethod
    def batch(bs): return torch.randn(bs, 3, 32, 32),torch.randint(10, (bs,))

class Transformer(Noted, nn.Sequential):
    "A small transformer that predicts tokens"
    def __init__(self, d=64, layers=2, seq=32):
        blocks = [nn.TransformerEncoderLayer(d, 4, 4*d, dropout=0., batch_first=True) for _ in range(layers)]
        super().__init__(nn.Embedding(128, d), *blocks, nn.Linear(d, 128))
    @staticmethod
    def batch(bs, seq=32): return (torch.randint(128, (bs,seq)),)*2

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

def fit(peer_cls, model, batches, k, bs, callbacks=0, **kwargs):
    "Train for one epoch on `batches`; `model.stamps` has the times of its forward passes then"
    case = Case('fast', '', kind='fast', micro=bs, accum=bs*k, n=bs*len(batches), epochs=1,
        **dict(lr=1e-3, mom=0.)|kwargs)
    peer = peer_cls()
    peer.callbacks,model.stamps = callbacks,[]
    peer.start(case, model)
    peer.fit(Ready(batches, bs), 1, bs, bs*k)

def train(peer_cls, model, k, n_batches, bs=16, callbacks=0):
    "Train for one epoch; returns the microseconds per micro-batch, one figure for each block of 16 (or k, if more)"
    fit(peer_cls, model, [model.batch(bs) for _ in range(n_batches)], k, bs, callbacks)
    s,block = model.stamps,max(16, k)
    assert len(s)==n_batches, f'{peer_cls.title}: {len(s)} forward passes for {n_batches} micro-batches'
    return [(s[i+block]-s[i])/block*1e6 for i in range(block, len(s)-block, block)]   # the first block warms up

def by_turns(classes, make, rounds, say, **kwargs):
    """The median of the microseconds per micro-batch, and the median of the ratios to the bare loop, a dict per arm.

    Of each round the fastest block counts: what else runs on the machine only ever adds"""
    times = {nm:[] for nm in classes}
    for i in range(rounds+1):
        for nm in list(classes) if i%2 else reversed(classes):
            torch.manual_seed(0)
            ts = train(classes[nm], make(), **kwargs)
            if i: times[nm].append(min(ts))   # the first round warms up
    say('.')
    def to_bare(ts): return statistics.median(a/b for a,b in zip(ts, times['bare']))
    return {nm:dict(us=statistics.median(ts), to_bare=to_bare(ts)) for nm,ts in times.items()}

def rate(o, bs=16): return dict(median=bs/o['us']*1e6, to_bare=1/o['to_bare'])

def run_fast(names, rounds=5):
    "Everything; some minutes"
    torch.set_num_threads(1)
    classes = load(names)
    def say(s): print(s, end='', flush=True)
    cost,growth = dict(tiny={}, conv={}, transformer={}),dict(k={}, parameters={}, callbacks={})
    def put(dest, size, res, f):
        for nm,o in res.items(): dest.setdefault(nm, {})[str(size)] = f(o)
    say('a tiny model, growth with k ')
    for k in (1,4,16,64):
        res = by_turns(classes, Tiny, rounds, say, k=k, n_batches=max(16,k)*6)
        if k<=16: put(cost['tiny'], k, res, lambda o: dict(median=o['us'], to_bare=o['to_bare']))
        put(growth['k'], k, res, lambda o: o['us'])
    for nm,make,n in (('conv',Conv,64),('transformer',Transformer,64)):
        say(f'\na {nm} ')
        for k in (1,4,16): put(cost[nm], k, by_turns(classes, make, 3, say, k=k, n_batches=n), rate)
    say('\ngrowth with the number of parameters ')
    for n in (2,10,50):
        res = by_turns(classes, lambda: Tiny(n), rounds-2, say, k=4, n_batches=96)
        put(growth['parameters'], 2*n, res, lambda o: o['us'])
    say('\ngrowth with the number of callbacks ')
    some = {o.key:o for o in classes.values() if o.__module__.rsplit('.')[-1] in with_callbacks or o.key=='bare'}
    for n in (0,4,16):
        res = by_turns(some, Tiny, rounds-2, say, k=4, n_batches=96, callbacks=n)
        put(growth['callbacks'], n, {k:v for k,v in res.items() if k!='bare'}, lambda o: o['us'])
    say('\nmemory ')
    memories = {}
    for nm,cls in [*classes.items(),('big',classes['bare'])]:
        memories[nm] = dict(title='real big batches' if nm=='big' else cls.title, peak=memory(cls, nm=='big'))
        say('.')
    say('\nwhere the time goes ')
    from . import where
    few = {nm:o for nm,o in classes.items() if nm in ('bare','fastai-plain','fastaccum')}
    wheres = {}
    for nm,make,n in (('tiny',Tiny,3200),('conv',Conv,256),('transformer',Transformer,256)):
        wheres[nm] = where.by_turns(few, make, 4, n)
        say('.')
    return dict(arms={nm:dict(title=o.title, how=o.how) for nm,o in classes.items()}, cost=cost,
        growth=growth, memory=memories, where=wheres)

def memory(peer_cls, big=False, k=4, bs=16):
    "The most bytes alive of the tensors made in a fit of a few steps; `big`: on real big batches"
    if big: k,bs = 1,bs*k
    model = Transformer(d=128, layers=4)
    data = [model.batch(bs) for _ in range(3*k)]
    fit(peer_cls, Tiny(), [Tiny.batch(bs) for _ in range(k)], k, bs)   # what is loaded late is loaded now
    with LiveTensors() as live: fit(peer_cls, model, data, k, bs)
    return live.peak
