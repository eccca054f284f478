"Train a set-up on full batches and on micro-batches, and note what differs and what is said"
import json, platform, sys, time, traceback, warnings
from collections import Counter
from datetime import date
from pathlib import Path
import fastai, torch
import fastaccum
from fastaccum import GradientAccumulation, GradientCache
from fastaccum.testing import both_runs, deviation, deviations
from .data import Still, full, in_double_precision, micro, seeded, set_ups

out = Path(__file__).parent.parent/'results'/'set_ups.json'
ways = dict(loader=dict(micro=micro), split=dict(micro=full, acc=dict(micro_batch_size=micro)),
    cache=dict(micro=full, acc=dict(micro_batch_size=micro), acc_cls=lambda n,**kwargs: GradientCache(**kwargs)))

def key_of(msg):
    "The entry that one of our messages links to; empty if it is not ours"
    return str(msg).partition('messages.html#')[2].split('\n')[0].strip()

def told(f):
    "What `f` returns, the keys of our warnings, and the error: its key, or its text if it is not ours"
    res = error = None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        try: res = f()
        except Exception as e:
            error = key_of(e) or f'{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ""}'
            if not key_of(e) and '-v' in sys.argv: traceback.print_exc()
    return res,sorted({key_of(o.message) for o in said}-{''}),error

def start(s): return [p.detach().clone() for p in seeded(s.make)(full).model.parameters()]

def compare(s, way, still=False):
    "Both runs: how far they are apart, and what is said"
    def fit(learn, cbs): return s.fit(learn, [*cbs, *([Still(s.still)] if still else [])])
    res,said,error = told(lambda: both_runs(accum_bs=full, fit=fit, make=seeded(s.make), **ways[way]))
    if error: return dict(said=said, error=error)
    a,b = res
    off = deviations(a, b) | dict(kept=deviation(s.keeps(a), s.keeps(b)))
    moved = max((p-q).abs().max().item() for p,q in zip(a.model.parameters(), start(s)) if p.shape==q.shape)
    apart = max((p-q).abs().max().item() for p,q in zip(a.model.parameters(), b.model.parameters()))
    differs = {k:v for k,v in off.items() if not v<=1e-7}
    return dict(said=said, apart=apart/moved, moved=moved, differs=differs)

def check(s):
    "What `accum_check` says of it"
    def run(): return seeded(s.make)(micro).accum_check(cbs=[GradientAccumulation(full)])
    res,said,error = told(run)
    if error: return dict(said=said, error=error)
    rows = {o.what:dict(off=o.off, ok=o.ok, where=o.where, remedy=o.remedy) for o in res.rows}
    return dict(said=said, ok=res.ok, rows=rows)

def run(nm):
    s,since = set_ups[nm],time.perf_counter()
    with s.around(), in_double_precision():
        found = {way:compare(s, way) for way in ways}
        for way in ways:
            if found[way].get('differs'): found[way]['still'] = compare(s, way, True)
        found['check'] = check(s)
    return dict(name=nm, repo=s.repo, path=s.path, what=s.what, **found, seconds=time.perf_counter()-since)

def short(o):
    if 'error' in o: return f"ERROR {o['error']} {o['said']}"
    if 'ok' in o: return f"{o['ok']} " + ' | '.join(f"{k} {v['off'] if v['off'] is None else format(v['off'],'.0e')} {v['where']}" for k,v in o['rows'].items() if not v['ok'])
    still = f" STILL[{short(o['still'])}]" if 'still' in o else ''
    return f"apart {o['apart']:.0e} {o['said']} { {k:float(f'{v:.0e}') for k,v in o['differs'].items()} }{still}"

def run_all(names):
    names = [o for o in names if o!='-v'] or list(set_ups)
    for nm in names:
        r = run(nm)
        print(f"== {nm} {r['seconds']:.1f}s", flush=True)
        for k in (*ways,'check'): print(f'   {k}: {short(r[k])}', flush=True)
report = None
