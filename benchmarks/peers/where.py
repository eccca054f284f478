"""Where the time of a micro-batch goes: samples of the stack, sorted by what it is doing.

A timer of processor time interrupts the fit every few milliseconds of it, and the stack says whether this is the
model, the backward pass, the optimizer, the loader, or the trainer around them, and which part of that."""
import signal, statistics
from collections import Counter
from . import fast

# What a stack is in, the outermost frame first: a part of a file's name, a function, and what that is
kinds = [('torch/_tensor.py','backward','backward pass'), ('torch/autograd/__init__.py','backward','backward pass'),
    ('torch/utils/data/','__next__','loader'), ('torch/optim/','','optimizer'), ('fastai/optimizer.py','','optimizer'),
    ('torch/nn/modules/module.py','_call_impl','model and loss'), ('torch/nn/functional.py','','model and loss')]
packages = ('fastaccum','fastai','fastcore','lightning','accelerate','transformers')
order = ['model and loss','backward pass','optimizer','loader','fastai','fastaccum','other']

def kind_of(frame):
    "What the stack is doing"
    stack = []
    while frame is not None:
        stack.append((frame.f_code.co_filename, frame.f_code.co_name))
        frame = frame.f_back
    for fn,nm in reversed(stack):
        for part,f,kind in kinds:
            if part in fn and f in ('',nm): return kind
    for fn,_ in stack:   # the innermost
        if '/benchmarks/' in fn: return 'model and loss' if _=='forward' else 'other'
        for p in packages:
            if f'/{p}/' in fn: return 'fastai' if p=='fastcore' else p
    return 'other'

def where(cls, make, k, n_batches, every=.004):
    "Microseconds per micro-batch of each kind"
    seen,model = Counter(),make()
    data = [model.batch(16) for _ in range(n_batches)]
    fast.fit(cls, make(), data[:2*k], k, 16)
    def look(sig, frame):   # not at what a trainer does before and after the micro-batches
        if k<=len(model.stamps)<n_batches: seen[kind_of(frame)] += 1
    old = signal.signal(signal.SIGPROF, look)
    signal.setitimer(signal.ITIMER_PROF, every, every)
    try: fast.fit(cls, model, data, k, 16)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, old)
    us = (model.stamps[-1]-model.stamps[k-1])/(n_batches-k)*1e6
    return {nm:n/seen.total()*us for nm,n in seen.items()}

def by_turns(classes, make, k, n_batches, rounds=3):
    "Medians for each arm"
    res = {nm:[] for nm in classes}
    for i in range(rounds):
        for nm in list(classes) if i%2 else reversed(classes): res[nm].append(where(classes[nm], make, k, n_batches))
    return {nm:{o:statistics.median(r.get(o, 0) for r in rs) for o in order} for nm,rs in res.items()}
