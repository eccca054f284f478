"""Train a set-up on full batches and on micro-batches, and note what differs and which warnings there are.

In double precision, where rounding is far below any other difference. If the runs differ, they are compared once more
with dropout and BatchNorm as in evaluation, and without the random numbers of callbacks: is anything else different?
"""
import contextlib, io, tempfile
from .data import *   # fastai's own GradientAccumulation among it, so fastaccum's has to come after
from fastaccum import GradientAccumulation, GradientCache
from fastaccum.testing import both_runs, deviation, deviations

ways = dict(loader=dict(micro=micro), split=dict(micro=full, acc=dict(micro_batch_size=micro)),
    cache=dict(micro=full, acc=dict(micro_batch_size=micro), acc_cls=lambda n,**kwargs: GradientCache(**kwargs)))
tolerance = 1e-7   # as in `assert_same_run`; where Adam divides by almost nothing, rounding grows to 1e-8

@contextmanager
def in_double_precision():
    "New tensors and results of `.float()` are in double precision, where a different run can be told from rounding"
    single,dtype = torch.Tensor.float,torch.get_default_dtype()
    torch.Tensor.float = lambda o, **kwargs: o.double(**kwargs)
    torch.set_default_dtype(torch.float64)
    try: yield
    finally:
        torch.Tensor.float = single
        torch.set_default_dtype(dtype)

class Still(Callback):
    "Dropout and BatchNorm as in evaluation, and callbacks without random numbers"
    order,run_valid = -9,False   # after fastai's TrainEvalCallback
    def __init__(self, without_draws): self.without_draws = without_draws
    def before_fit(self): self.without_draws(self.learn)
    def before_train(self):
        for m in self.model.modules():
            if any(o in type(m).__name__ for o in ('Dropout','BatchNorm','StochasticDepth')): m.eval()

def seeded(make):
    "`make` with all random numbers from the beginning, and without progress bars and printed rows"
    def run(bs, **_):
        set_seed(0)
        learn = make(bs).remove_cb(ProgressCallback)
        learn.logger = noop
        return learn
    return run

def key_of(msg):
    "The entry that one of fastaccum's messages links to; empty for messages of others"
    return str(msg).partition('messages.html#')[2].split('\n')[0].strip()

def observed(f):
    "What `f` returns, and a dict of the keys of fastaccum's warnings and of the error: its key, or its text"
    res = error = None
    with warnings.catch_warnings(record=True) as said, contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter('always')
        try: res = f()
        except Exception as e: error = key_of(e) or f"{type(e).__name__}: {' '.join(str(e).split())}"
    found = dict(said=sorted({key_of(o.message) for o in said}-{''}))
    if error: found['error'] = error
    return res,found

def compare(s, way, still=False):
    "Both runs: what differs, and which warnings there are"
    more = [Still(s.still)] if still else []
    def fit(learn, cbs): return s.fit(learn, [*cbs, *more])
    res,found = observed(lambda: both_runs(accum_bs=full, fit=fit, make=seeded(s.make), **ways[way]))
    if res is None: return found
    diffs = deviations(*res) | dict(kept=deviation(*map(s.keeps, res)))
    return found | dict(differs={k:v for k,v in diffs.items() if not v<=tolerance})

def check(s):
    "The causes that `accum_check` names"
    res,found = observed(lambda: seeded(s.make)(micro).accum_check(cbs=[GradientAccumulation(full)]))
    if res is None: return found
    return found | dict(ok=res.ok, off={o.what:o.where for o in res.rows if not o.ok})

def is_same(o): return 'error' not in o and not o['differs']

def run(nm):
    "Everything that was found, a dict"
    s,found = set_ups[nm],{}
    with s.around(), in_double_precision(), tempfile.TemporaryDirectory() as d, working_directory(d):
        for way in ways:
            if way=='cache' and all(is_same(found[o].get('still', found[o])) for o in ('loader','split')): break
            found[way] = compare(s, way)
            if found[way].get('differs'): found[way]['still'] = compare(s, way, still=True)
        found['check'] = check(s)
    return found
