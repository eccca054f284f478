"""What fastaccum itself costs where a run is large: seconds and MB of each of its pieces, one at a time.

A run of 10⁹ samples, 10⁶ steps or 10⁵ epochs is not trained here: the pieces that grow with it are measured at these
sizes, and what they take in a whole run follows. Of 64 processes, each measures its own plan; what is exchanged
between them is counted, not sent. `python -m benchmarks.scale` writes `benchmarks/results/scale.json` and prints
Markdown tables, in a minute or two.
"""
import os
os.environ.setdefault('OMP_NUM_THREADS', '1')
import argparse, json, sys, time, tracemalloc, warnings
from pathlib import Path
warnings.filterwarnings('ignore')
root = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(root))

import torch
from fastai.callback.core import Callback
from fastaccum import GradientAccumulation
from fastaccum.core.plan import Plan
from fastaccum.processes.shares import SharedPlan
from fastaccum.testing import toy
from benchmarks.peers import fast, report
from benchmarks.peers.bare import Bare
from benchmarks.peers.fastaccum import Fastaccum

def rising(pos): return 256+round(256*pos.pct)

def clocked(f):
    "What `f` returns, the processor time it takes in seconds, and the most MB it holds when it is run again"
    start = time.process_time()
    res = f()
    secs = time.process_time()-start
    if secs>20: return res,secs,float('nan')   # tracing is slow
    tracemalloc.start()
    f()
    mb = tracemalloc.get_traced_memory()[1]/2**20
    tracemalloc.stop()
    return res,secs,mb

def walk(plan, epoch=0, n=None):
    "What a fit asks of its plan in `n` steps of an epoch; all of them without `n`"
    step,i,pct = plan.before(epoch),0,0.
    todo = plan.n if n is None else n*512
    while i*plan.cut<min(plan.n, todo):
        size = plan.begin(epoch, step, i)[1]
        pct = plan.next_pct(pct, epoch)
        step,i = step+1,i-(-size//plan.cut)
    return step

plans = [
    ('10⁹ samples, one epoch, steps of 1,000 (10⁶ steps)', 'plan', lambda: Plan(10**9, 50, 1000, 1),
        lambda p: p.steps[0]),
    ('the same', 'asked through a whole epoch', lambda: Plan(10**9, 50, 1000, 1), lambda p: walk(p)),
    ('10⁹ samples, a schedule', 'plan and its first step', lambda: Plan(10**9, 50, rising, 1),
        lambda p: p.begin(0, 0, 0)),
    ('the same', 'first progress of an epoch: its steps are counted', lambda: Plan(10**9, 500, rising, 1),
        lambda p: p.next_pct(0., 0)),
    ('10⁵ epochs of 10,000 samples', 'plan', lambda: Plan(10**4, 50, 1000, 10**5), lambda p: p.before(10**5)),
    ('10⁵ epochs, a schedule', 'steps of the whole run', lambda: Plan(10**4, 50, rising, 10**5),
        lambda p: p.before(10**5)),
    ('10⁶ steps in 64 processes', 'plan', lambda: SharedPlan(0, ((50,10**9//64,False,50),)*64, 64*50, 1, False),
        lambda p: p.steps[0]),
    ('64 processes, a schedule', 'plan and its first step',
        lambda: SharedPlan(0, ((50,10**9//64,False,50),)*64, lambda pos: 64*rising(pos), 1, False),
        lambda p: p.begin(0, 0, 0)),
]

class Wide(fast.Tiny):
    "Many parameter tensors"
    def __init__(self): super().__init__(150)

def per_batch(make, callbacks, rounds=15):
    "Microseconds per micro-batch of a bare loop, and with fastaccum, at their fastest: what else runs only ever adds"
    times = dict(bare=[], fastaccum=[])
    for _ in range(rounds):
        for nm,cls in (('bare',Bare),('fastaccum',Fastaccum)):
            times[nm] += fast.train(cls, make(), 4, 96, callbacks=callbacks)
    return {nm:min(ts) for nm,ts in times.items()}

def grows(n_steps):
    "Bytes that the callback and the Recorder hold more after `n_steps` more steps"
    learn = toy(4, n=8*n_steps)
    learn.validate = None
    learn.fit(1, 1e-3, cbs=GradientAccumulation(8))   # warm
    acc,held = GradientAccumulation(8),[]
    class Look(Callback):
        order = 99
        def after_step(self):
            if learn.recorder.smooth_loss.count in (n_steps//2,n_steps-2):
                held.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.start()
    learn.fit(1, 1e-3, cbs=[acc,Look()])
    tracemalloc.stop()
    return (held[1]-held[0])/(n_steps-2-n_steps//2)

cases = {'4 parameter tensors':(fast.Tiny,0), '300 parameter tensors':(Wide,0),
    '64 callbacks that do nothing':(fast.Tiny,64)}

def measure():
    "Plans, pieces of a micro-batch, and what is kept"
    planned = []
    for run,what,make,ask in plans:
        res,s,mb = clocked(lambda: ask(make()))
        res = f'{res:,}' if isinstance(res, int) else f'{res:.3g}' if isinstance(res, float) else str(res)
        planned.append(dict(run=run, what=what, result=res, s=s, mb=mb))
    return dict(plans=planned, batch={nm:per_batch(*o) for nm,o in cases.items()}, held=grows(2000))

def main():
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument('--note', help='a remark to go into the results')
    args = args.parse_args()
    torch.set_num_threads(1)
    res = dict(about=report.about(args.note))|measure()
    (root/'benchmarks/results/scale.json').write_text(json.dumps(res, indent=1)+'\n')
    print(report.scale(res))

if __name__=='__main__': main()
