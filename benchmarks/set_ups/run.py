"""Train a set-up on full batches and on micro-batches, and note what differs and what is said

In double precision, where rounding is far below any other difference. If the runs differ, they are compared once more
with dropout and BatchNorm as in evaluation, and without the random numbers of callbacks: is anything else different?
"""
import contextlib, io, tempfile, time, warnings
from fastcore.xtras import working_directory
from fastaccum import GradientAccumulation, GradientCache
from fastaccum.testing import both_runs, deviation, deviations
from .data import Still, full, in_double_precision, micro, seeded, set_ups

ways = dict(loader=dict(micro=micro), split=dict(micro=full, acc=dict(micro_batch_size=micro)),
    cache=dict(micro=full, acc=dict(micro_batch_size=micro), acc_cls=lambda n,**kwargs: GradientCache(**kwargs)))
tol = 1e-7   # as in `assert_same_run`; where Adam divides by almost nothing, rounding grows to 1e-8

def key_of(msg):
    "The entry that one of our messages links to; empty if it is not ours"
    return str(msg).partition('messages.html#')[2].split('\n')[0].strip()

def told(f):
    "What `f` returns, the keys of our warnings, and the error: its key, or its text if it is not ours"
    res = error = None
    with warnings.catch_warnings(record=True) as said, contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter('always')
        try: res = f()
        except Exception as e: error = key_of(e) or f"{type(e).__name__}: {' '.join(str(e).split())}"
    return res,dict(said=sorted({key_of(o.message) for o in said}-{''})) | (dict(error=error) if error else {})

def compare(s, way, still=False):
    "Both runs: what differs, and what is said"
    def fit(learn, cbs): return s.fit(learn, [*cbs, *([Still(s.still)] if still else [])])
    res,found = told(lambda: both_runs(accum_bs=full, fit=fit, make=seeded(s.make), **ways[way]))
    if res is None: return found
    off = deviations(*res) | dict(kept=deviation(*map(s.keeps, res)))
    return found | dict(differs={k:float(f'{v:.1g}') for k,v in off.items() if not v<=tol})

def check(s):
    "What `accum_check` says of it"
    res,found = told(lambda: seeded(s.make)(micro).accum_check(cbs=[GradientAccumulation(full)]))
    if res is None: return found
    return found | dict(ok=res.ok, off={o.what:o.where for o in res.rows if not o.ok})

def is_same(o): return 'error' not in o and not o['differs']

def run(nm):
    "All that was found"
    s,since,found = set_ups[nm],time.process_time(),{}
    with s.around(), in_double_precision(), tempfile.TemporaryDirectory() as d, working_directory(d):
        for way in ways:
            if way=='cache' and all(is_same(found[o].get('still', found[o])) for o in ('loader','split')): break
            found[way] = compare(s, way)
            if found[way].get('differs'): found[way]['still'] = compare(s, way, True)
        found['check'] = check(s)
    return dict(name=nm, repo=s.repo, path=s.path, what=s.what, seconds=round(time.process_time()-since, 1), **found)
