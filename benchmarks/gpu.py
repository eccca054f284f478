"""What a micro-batch costs on a GPU, with fastaccum and with the peers that are installed (see `make peers`).

Samples per second, peak memory, host syncs per step, and the time to the same loss, at two model sizes, in fp32,
fp16 and bf16; the arms are alternated in one process. Then what memory that really runs out does: a fit with
`micro_batch_size='auto'` whose batches do not fit, beside the same fit in micro-batches that do, and the size that
`bs_find` finds, and whether four times as much fits. `python -m benchmarks.gpu [--out FILE]` prints tables, and
appends them to FILE with date, versions and hardware. Without a GPU it runs a tiny size on the CPU, to try the
script; there a model says that memory has run out.

What else there is to run on a device: `python benchmarks/ways.py cuda` (three ways to the big batch, with their memory
and time), and the pages' cells with `#| cuda` (`nbdev-test --flags cuda`).
"""
import argparse, datetime, importlib, platform, statistics, sys, time, warnings
from contextlib import contextmanager
from pathlib import Path
warnings.filterwarnings('ignore')
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import fastai, torch
from torch import nn
from torch.utils.data import TensorDataset
from fastai.callback.progress import ProgressCallback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.optimizer import SGD
from fastcore.basics import noop
import fastaccum
from fastaccum import GradientAccumulation
from fastaccum import AutoSize
from benchmarks.peers import fast
from benchmarks.peers.cases import Case

cuda = torch.cuda.is_available()
dev = torch.device('cuda' if cuda else 'cpu')
sizes = dict(small=dict(d=512, layers=6, bs=32, seq=256), large=dict(d=1536, layers=16, bs=16, seq=512)) if cuda else \
    dict(tiny=dict(d=32, layers=2, bs=4, seq=16))
vocab,n_batches,k,rounds,n_epoch = 1024,(32 if cuda else 8),4,(5 if cuda else 1),(8 if cuda else 2)

class Model(nn.Module):
    "A transformer that predicts tokens, and notes when its forward passes begin on the device"
    def __init__(self, d, layers, **_):
        super().__init__()
        self.stamps,self.emb = [],nn.Embedding(vocab, d)
        layer = nn.TransformerEncoderLayer(d, max(1, d//64), 4*d, dropout=0., batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(d, vocab)
    def forward(self, x):
        if cuda:
            self.stamps.append(torch.cuda.Event(enable_timing=True))
            self.stamps[-1].record()
        else: self.stamps.append(time.perf_counter())
        return self.head(self.blocks(self.emb(x)))
    def ms(self, start=k):
        "Milliseconds per micro-batch, the first few left out"
        a,b = self.stamps[start],self.stamps[-1]
        return (a.elapsed_time(b) if cuda else (b-a)*1e3)/(len(self.stamps)-1-start)

def new_model(size):
    torch.manual_seed(0)
    return Model(**size).to(dev)

def batches(n, bs, seq, **_):
    "Tokens, and for each another that follows from it: something to learn"
    xs = [torch.randint(vocab, (bs,seq), device=dev) for _ in range(n)]
    return [(x,(x*7+3)%vocab) for x in xs]

def load():
    "The arms whose packages are installed"
    res = {}
    for mod,nm in fast.arms:
        try: cls = getattr(importlib.import_module(f'benchmarks.peers.{mod}'), nm)
        except ImportError as e: print(f'{mod} is left out: {e}')
        else: res[cls.key] = cls
    return res

def fit(cls, model, data, amp, size, k=k, **kwargs):
    fast.fit(cls, model, data, k, size['bs'], amp=amp, device=dev.type, **kwargs)
    if cuda: torch.cuda.synchronize()

def cost(cls, data, amp, size):
    "Samples per second and peak memory in MiB"
    model = new_model(size)
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    fit(cls, model, data, amp, size)
    return size['bs']/model.ms()*1e3,(torch.cuda.max_memory_allocated()/2**20 if cuda else float('nan'))

def syncs(cls, data, amp, size):
    "How often the host waits for the device in a step: what a fit of twice as many steps has more"
    if not cuda: return float('nan')
    def count(data):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter('always')
            torch.cuda.set_sync_debug_mode('warn')
            try: fast.fit(cls, new_model(size), data, k, size['bs'], amp=amp, device=dev.type)
            finally: torch.cuda.set_sync_debug_mode('default')
        return sum('synchroniz' in str(o.message) for o in seen)
    return (count(data)-count(data[:len(data)//2]))/(len(data)/2/k)

def loss_of(model, data):
    "The mean loss over all samples, in single precision"
    case = Case('', '')
    with torch.no_grad(): return statistics.mean(case.loss(model(x), y).item() for x,y in data)

def to_loss(cls, data, amp, size, target=None, epochs=n_epoch, k=k):
    "Seconds of training and epochs until the loss is `target`; without one, for so many epochs; and the loss"
    model,secs = new_model(size),0.
    for epoch in range(2*epochs if target else epochs):
        fit(cls, model, data, amp, size, k=k, lr=.2)
        secs += model.ms(0)*len(data)/1e3
        loss = loss_of(model, data)
        if target and loss<=target: break
    return secs,epoch+1,loss

class Short(Model):
    "Without a GPU it takes at most eight samples"
    def forward(self, x):
        if not cuda and len(x)>8: raise torch.OutOfMemoryError('CPU out of memory (a trial)')
        return super().forward(x)

def learner(size, bs, n):
    "A Learner with batches of `bs`, of `n` in all"
    torch.manual_seed(0)
    case,(x,y) = Case('', ''),batches(1, **size|dict(bs=n))[0]
    train = DataLoader(TensorDataset(x.cpu(), y.cpu()), bs=bs, device=dev)
    learn = Learner(DataLoaders(train, train), Short(**size).to(dev), case.loss, opt_func=SGD, lr=1e-2)
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return learn

@contextmanager
def scarce(gib):
    "Leave so much of the device's memory, or all of it if that is less"
    if not cuda: return (yield)
    total = torch.cuda.get_device_properties(dev).total_memory/2**30
    torch.cuda.set_per_process_memory_fraction(min(1., gib/total))
    try: yield
    finally: torch.cuda.set_per_process_memory_fraction(1.)

def shortage(size):
    "What `bs_find` finds, whether twice that fits, and how far a recovered fit is from one whose batches fit"
    with scarce(8), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        found = int(learner(size, 4, 64).bs_find(show_plot=False))
        def fit(bs, **kwargs):
            learn = learner(size, bs, 4*found)
            learn.fit(1, 1e-2, cbs=GradientAccumulation(4*found, **kwargs))
            return learn
        try: fit(4*found)
        except torch.OutOfMemoryError: above = 'runs out of memory'
        else: above = 'fits, too'
        auto = AutoSize()
        a,b = fit(found),fit(4*found, micro_batch_size=auto)
    off = max((p-q).abs().max().item() for p,q in zip(a.model.parameters(), b.model.parameters()))
    return found,above,auto.train,off

def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--out', type=Path, help='append the tables to this file')
    out,lines = parser.parse_args().out,[]
    def say(*rows):
        lines.extend(rows)
        print('\n'.join(rows), flush=True)
    hardware = torch.cuda.get_device_name() if cuda else f'{platform.machine()} CPU (only a trial of the script)'
    if not cuda: torch.set_num_threads(1)
    classes = load()
    say(f'## {datetime.date.today()}, {hardware}', '',
        f'fastaccum {fastaccum.__version__}, fastai {fastai.__version__}, torch {torch.__version__}, '
        f'python {platform.python_version()}; {n_batches} micro-batches, {k} a step, {rounds} rounds, medians', '',
        '| model | precision | | ms/micro-batch | samples/s | to the bare loop '
        '| peak MiB | to the bare loop | syncs/step |',
        '|---'*9+'|')
    for nm,size in sizes.items():
        data = batches(n_batches, **size)
        for amp in (None,'fp16','bf16'):
            runs = {o:[] for o in classes}
            for i in range(rounds+1):
                for o in list(classes) if i%2 else reversed(classes):
                    res = cost(classes[o], data, amp, size)
                    if i: runs[o].append(res)   # the first round warms up
            for o,rs in runs.items():
                rate,mem = (statistics.median(r[i] for r in rs) for i in (0,1))
                to_rate,to_mem = (statistics.median(a[i]/b[i] for a,b in zip(rs, runs['bare'])) for i in (0,1))
                ms,n = size['bs']/rate*1e3,syncs(classes[o], data, amp, size)
                say(f'| {nm} | {amp or "fp32"} | {classes[o].title} | {ms:.2f} | {rate:.0f} | {to_rate:.3f} | '
                    f'{mem:.0f} | {to_mem:.3f} | {n:.1f} |')
    nm,size = next(iter(sizes.items()))
    data = batches(n_batches-1, **size)   # an epoch ends with a remainder
    say('', f'To the loss that the bare loop has after {n_epoch} epochs of {len(data)} micro-batches, {nm} model', '',
        '| precision | | seconds | epochs | loss |', '|---|---|---|---|---|')
    for amp in (None,'fp16','bf16'):
        target = to_loss(classes['bare'], data, amp, size)[2]
        for o,cls in classes.items():
            if o=='fastai-plain': continue   # takes k times as many steps
            secs,n,loss = to_loss(cls, data, amp, size, target*1.001)
            say(f'| {amp or "fp32"} | {cls.title} | {secs:.2f} | {n} | {loss:.4f} |')
    say('', 'Memory that runs out: 8 GiB of the device are left, where there are more', '',
        '| model | `bs_find` | four times as much | `auto` goes on with | weights off the fit that fits by |',
        '|---'*5+'|')
    for nm,size in sizes.items():
        found,above,after,off = shortage(size)
        say(f'| {nm} | {found} | {above} | {after} | {off:.0e} |')
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open('a') as f: f.write('\n'.join(lines)+'\n\n')

if __name__=='__main__': main()
