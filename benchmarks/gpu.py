"""The cost of a micro-batch on a GPU, with fastaccum and the other libraries that are installed (see `make peers`).

The table has samples per second, peak memory and synchronizations per step, of two model sizes, in fp32, fp16 and bf16.
`python -m benchmarks.gpu` runs all of them by turns in one process, and writes `results/gpu.md`. Without a GPU, it
runs a tiny model on the CPU, to try the script, and writes nothing.

Other scripts for a GPU: `python -m benchmarks.ways cuda` (the ways to the full batch, with their memory
and time), `python -m benchmarks.pets`, and the pages' cells with `#| cuda` (`nbdev-test --flags cuda`).
"""
import time, warnings
warnings.filterwarnings('ignore')
from functools import partial
from statistics import median
import benchmarks
from benchmarks import live
import torch
from benchmarks.peers import fast

cuda = torch.cuda.is_available()
dev = torch.device('cuda' if cuda else 'cpu')
sizes = dict(small=dict(d=512, layers=6, bs=32, seq=256), large=dict(d=1536, layers=16, bs=16, seq=512)) if cuda else \
    dict(tiny=dict(d=32, layers=2, bs=4, seq=16))
n_batches,k,rounds = (32 if cuda else 8),4,(5 if cuda else 1)

class Model(fast.Transformer):
    "A transformer that predicts tokens, and records when its forward passes begin on the device"
    def now(self):
        if not cuda: return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    def milliseconds(self):
        "Return the milliseconds per micro-batch, without the first step"
        a,b = self.stamps[k],self.stamps[-1]
        return (a.elapsed_time(b) if cuda else (b-a)*1e3)/(len(self.stamps)-1-k)

def new_model(size):
    torch.manual_seed(0)
    return Model(size['d'], size['layers']).to(dev)

def load():
    "Return the libraries that are installed"
    res = {}
    for mod,_ in fast.arms:
        try: res |= fast.load([mod])
        except ImportError as e: print(f'{mod} is left out: {e}')
    return res

def fit(cls, model, data, amp, size):
    fast.fit(cls, model, data, k, size['bs'], amp=amp, device=dev.type)
    if cuda: torch.cuda.synchronize()

def cost(cls, data, amp, size):
    "Return the milliseconds per micro-batch, and the peak memory in MiB"
    model = new_model(size)
    nbytes = live.peak_bytes(lambda: fit(cls, model, data, amp, size), dev)
    return model.milliseconds(),nbytes/2**20

def syncs(cls, data, amp, size):
    "Return the synchronizations per step, from the difference between a fit and one of half as many steps"
    if not cuda: return float('nan')
    def count(data):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter('always')
            torch.cuda.set_sync_debug_mode('warn')
            try: fast.fit(cls, new_model(size), data, k, size['bs'], amp=amp, device=dev.type)
            finally: torch.cuda.set_sync_debug_mode('default')
        return sum('synchroniz' in str(o.message) for o in seen)
    return (count(data)-count(data[:len(data)//2]))/(len(data)/2/k)

def costs(classes):
    "Yield the rows of the table"
    for (nm,size),amp in ((o,amp) for o in sizes.items() for amp in (None,'fp16','bf16')):
        data = [(torch.randint(128, (size['bs'],size['seq']), device=dev),)*2 for _ in range(n_batches)]
        arms = {o:partial(cost, cls, data, amp, size) for o,cls in classes.items()}
        found = {o:list(zip(*runs)) for o,runs in benchmarks.by_turns(arms, rounds).items()}
        for o,(ms,mib) in found.items():
            ratio,rate = benchmarks.median_ratio(ms, found['bare'][0]),size['bs']/median(ms)*1e3
            yield (nm,amp or 'fp32',classes[o].title,f'{median(ms):.2f}',f'{ratio:.3f}',f'{rate:.0f}',
                f'{median(mib):.0f}',f'{syncs(classes[o], data, amp, size):.1f}')

def main():
    if not cuda: torch.set_num_threads(1)
    head = ['model','precision','','ms/micro-batch','to the bare loop','samples/s','peak MiB','syncs/step']
    about = f'{n_batches} micro-batches, {k} a step; medians of {rounds} rounds. Measured {benchmarks.made()}.'
    text = f'{benchmarks.table(head, costs(load()))}\n\n{about}'
    print(text)
    if cuda: (benchmarks.results/'gpu.md').write_text(text+'\n', encoding='utf-8')

if __name__=='__main__': main()
