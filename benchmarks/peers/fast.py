"""What a micro-batch costs with each peer: time on the host, samples per second, peak memory, and how they grow.

All arms run in one process, by turns. The model notes the time of each forward pass; the time from one to the one 16 later is what is measured,
so what a Trainer does before and after a fit does not count. Peak memory is measured in a process for each arm."""
import importlib, json, statistics, subprocess, sys, time, torch
from dataclasses import replace
from torch import nn
from torch.utils.data import DataLoader
from .cases import Case

arms = [('bare','Bare'),('accelerate','Accumulate'),('lightning','Lightning'),('transformers','NumItems'),('fastai','Plain'),('fastai','Fastai'),
        ('fastxtend','KeepLast'),('fastaccum','Fastaccum')]
with_callbacks = {'lightning','transformers','fastai','fastxtend','fastaccum'}   # modules of those that have callbacks

def load(names):
    "The classes of the arms, by key; the bare loop is always among them, to compare with"
    res = [getattr(importlib.import_module(f'.{mod}', __package__), nm) for mod,nm in arms if mod in names or mod=='bare']
    return {o.key:o for o in res}

class Noted:
    "A model that notes when its forward passes begin"
    def forward(self, x):
        self.stamps.append(time.perf_counter())
        return super().forward(x)

class Tiny(Noted, nn.Sequential):
    "So small that little but the host's work is left; `n` layers, each with two parameter tensors"
    def __init__(self, n=2): super().__init__(nn.Linear(10,16), nn.ReLU(), *(nn.Linear(16,16) for _ in range(n-2)), nn.Linear(16,3))
    @staticmethod
    def batch(bs): return torch.randn(bs, 10),torch.randint(3, (bs,))

class Conv(Noted, nn.Sequential):
    "A small convolutional network"
    def __init__(self):
        super().__init__(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GroupNorm(4, 32), nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    @staticmethod
    def batch(bs): return torch.randn(bs, 3, 32, 32),torch.randint(10, (bs,))

class Transformer(Noted, nn.Sequential):
    "A small transformer that predicts tokens"
    def __init__(self, d=64, layers=2, seq=32):
        super().__init__(nn.Embedding(128, d), *(nn.TransformerEncoderLayer(d, 4, 4*d, dropout=0., batch_first=True) for _ in range(layers)), nn.Linear(d, 128))
    @staticmethod
    def batch(bs, seq=32): return (torch.randint(128, (bs,seq)),)*2

class Loader(DataLoader):
    "Batches that are ready, so that loading costs next to nothing"
    def __init__(self, batches, bs):
        super().__init__(batches, batch_size=None)
        self.bs,self.device = bs,torch.device('cpu')

class Ready:
    "Data as the peers want it"
    def __init__(self, batches, bs): self.batches,self.bs = batches,bs
    def __len__(self): return len(self.batches)*self.bs
    def loader(self, bs, collate_fn=None):
        if collate_fn is None: return Loader(self.batches, bs)
        return Loader([dict(x=x, labels=y) for x,y in self.batches], bs)

def train(peer_cls, model, k, n_batches, bs=16, callbacks=0):
    "Train for one epoch; returns the microseconds per micro-batch, one figure for each block of 16 (or k, if more)"
    case = Case('fast', '', kind='fast', micro=bs, accum=bs*k, n=bs*n_batches, epochs=1, lr=1e-3, mom=0.)
    peer,block = peer_cls(),max(16, k)
    peer.callbacks,model.stamps = callbacks,[]
    peer.start(case, model)
    peer.fit(Ready([model.batch(bs) for _ in range(n_batches)], bs), 1, bs, bs*k)
    s = model.stamps
    assert len(s)==n_batches, f'{peer.title}: {len(s)} forward passes for {n_batches} micro-batches'
    return [(s[i+block]-s[i])/block*1e6 for i in range(block, len(s)-block, block)]   # the first block warms up

def by_turns(classes, make, rounds, say, **kwargs):
    "The median of the microseconds per micro-batch, and the median of the ratios to the bare loop, a dict per arm"
    times = {nm:[] for nm in classes}
    for i in range(rounds+1):
        for nm in list(classes) if i%2 else reversed(classes):
            torch.manual_seed(0)
            ts = train(classes[nm], make(), **kwargs)
            if i: times[nm].append(statistics.median(ts))   # the first round warms up
    say('.')
    return {nm:dict(us=statistics.median(ts), to_bare=statistics.median(a/b for a,b in zip(ts, times['bare']))) for nm,ts in times.items()}

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
    for nm,make,n in (('conv',Conv,80),('transformer',Transformer,80)):
        say(f'\na {nm} ')
        for k in (1,4,16): put(cost[nm], k, by_turns(classes, make, 3, say, k=k, n_batches=n), rate)
    say('\ngrowth with the number of parameters ')
    for n in (2,10,50): put(growth['parameters'], 2*n, by_turns(classes, lambda: Tiny(n), rounds-2, say, k=4, n_batches=80), lambda o: o['us'])
    say('\ngrowth with the number of callbacks ')
    some = {o.key:o for o in classes.values() if o.__module__.rsplit('.')[-1] in with_callbacks or o.key=='bare'}
    for n in (0,4,16):
        res = by_turns(some, Tiny, rounds-2, say, k=4, n_batches=80, callbacks=n)
        put(growth['callbacks'], n, {k:v for k,v in res.items() if k!='bare'}, lambda o: o['us'])
    say('\npeak memory ')
    memories = {}
    for nm in [*classes,'big']:
        out = subprocess.run([sys.executable,'-W','ignore','-m',__package__,'--memory',nm], capture_output=True, text=True)
        if out.returncode: sys.exit(f'the memory of {nm} could not be measured:\n{out.stderr[-2000:]}')
        memories[nm] = json.loads(out.stdout.splitlines()[-1])
        say('.')
    return dict(arms={nm:dict(title=o.title, how=o.how) for nm,o in classes.items()}, cost=cost, growth=growth, memory=memories)

def rss(): return int(open('/proc/self/statm').read().split()[1])*4096/2**20   # pages to MiB; Linux only

def memory(nm, k=4, bs=16):
    "Print the peak memory of an arm in this process, as JSON. 'big' is the bare loop on real big batches"
    import resource
    torch.set_num_threads(1)
    big = nm=='big'
    peer_cls = load([mod for mod,_ in arms])['bare'] if big else load([mod for mod,o in arms if getattr(importlib.import_module(f'.{mod}', __package__), o).key==nm])[nm]
    if big: k,bs = 1,bs*k
    model = Transformer(d=128, layers=4)
    train(peer_cls, Tiny(), k, 48)   # what is loaded late is loaded now
    before = rss()
    train(peer_cls, model, k, 48, bs)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss/1024
    print(json.dumps(dict(title='real big batches' if big else peer_cls.title, more=peak-before, all=peak)))
