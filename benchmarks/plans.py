"""What it costs to know the steps of a run before it starts, in seconds and MB.

For samples x micro-batch size x epochs x sizes. `made`: the plan is made; `first`: what its first epoch needs, after
that; `all`: the numbers of steps of every epoch, after that. MB is the most that was held.
`python benchmarks/plans.py` prints a Markdown table; `--slow` counts 10⁹ steps of a function too (minutes).
"""
import sys, time, tracemalloc
from fastaccum.core.plan import Plan
from fastaccum.processes.shares import SharedPlan

def rising(pos): return 32+round(480*pos.pct)

cases = [(n, bs, n_epoch, size) for size in (256,rising) for n,bs,n_epoch in (
    (50_000,64,10), (1_281_167,64,100), (10**9,64,10), (10**9,1,10), (10_000,64,10**5), (1000,64,10**6))]

def one(n, bs, n_epoch, size): return Plan(n, bs, size, n_epoch)
def eight(n, bs, n_epoch, size): return SharedPlan(0, ((bs,n//8),)*8, size, n_epoch)

def clocked(f):
    "What `f` returns and the seconds it takes"
    start = time.perf_counter()
    res = f()
    return res,time.perf_counter()-start

def begin(plan):
    "What the first epoch needs"
    plan.begin(0, plan.before(0), 0)
    plan.next_pct(0., 0)

def steps(plan): return plan.before(plan.n_epoch)

def measure(make, case):
    "Seconds for each of the three, in a row; the most MB held while doing it again; and the steps"
    plan,made = clocked(lambda: make(*case))
    first,(n,every) = clocked(lambda: begin(plan))[1],clocked(lambda: steps(plan))
    secs = made,first,every
    tracemalloc.start()
    plan = make(*case)
    begin(plan)
    if sum(secs)<3: steps(plan)   # tracing is slow
    mb = tracemalloc.get_traced_memory()[1]/2**20
    tracemalloc.stop()
    return secs,mb,n

def main():
    print('| processes | sizes | samples | micro-batches of | epochs | steps | made, s | first, s | all, s | MB |')
    print('|---'*10+'|')
    for make in (one,eight):
        for n,bs,n_epoch,size in cases:
            if callable(size) and n*n_epoch>2*10**9 and '--slow' not in sys.argv: continue
            secs,mb,n_steps = measure(make, (n,bs,n_epoch,size))
            nm = 'a function' if callable(size) else size
            print(f"| {'one' if make is one else 8} | {nm} | {n:,} | {bs} | {n_epoch:,} | {n_steps:,} | "
                f"{' | '.join(f'{o:.2g}' for o in secs)} | {mb:.2g} |", flush=True)

if __name__=='__main__': main()
