"""Random twins: is a run on micro-batches the big batch's run?

`python tests/sweep.py 10000` draws that many configurations, runs both twins of each and prints the worst deviations.
"""
import os, random, sys, warnings
os.environ.setdefault('OMP_NUM_THREADS', '1')   # the processes are many, and the models tiny
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import torch
from fastai.callback.training import GradientClip
from fastai.metrics import accuracy
from fastai.optimizer import Adam, OptimWrapper, RAdam, SGD
from fastaccum.testing import assert_twins, twins

opts = dict(sgd=partial(SGD, mom=0.9), adam=Adam, radam=RAdam, torch_adamw=partial(OptimWrapper, opt=torch.optim.AdamW))

def fit(learn, cbs, how, n_epoch, lr, wd, frozen_first):
    "One of fastai's ways to fit, perhaps after a fit with a frozen body"
    if frozen_first:
        learn.freeze()
        learn.fit(1, lr, wd=wd, cbs=cbs)
        learn.unfreeze()
    if   how=='fit':       learn.fit(n_epoch, slice(lr/10, lr), wd=wd, cbs=cbs)
    elif how=='one_cycle': learn.fit_one_cycle(n_epoch, lr, wd=wd, cbs=cbs)
    elif how=='flat_cos':  learn.fit_flat_cos(n_epoch, lr, wd=wd, cbs=cbs)
    elif how=='sgdr':      learn.fit_sgdr(n_epoch, 1, lr, wd=wd, cbs=cbs)
    elif how=='fine_tune': learn.fine_tune(n_epoch, lr, wd=wd, cbs=cbs)
    elif how=='resumed':   learn.fit_one_cycle(n_epoch+1, lr, wd=wd, cbs=cbs, start_epoch=1)
    elif how=='two_fits':
        learn.fit_one_cycle(1, lr, wd=wd, cbs=cbs)
        learn.fit(n_epoch, lr/2, wd=wd, cbs=cbs)

def draw(seed):
    "A random configuration: arguments for `twins`"
    r = random.Random(seed)
    micro = r.randint(1, 9)
    macro,n = r.randint(1, 40),r.randint(12, 90)
    drop_last = r.random()<0.25
    if drop_last: n = max(n, -(-macro//micro)*micro)
    loader_drop_last = r.random()<0.3
    opt = r.choice(list(opts))
    lr = r.choice([1e-2,5e-2]) if opt=='sgd' else r.choice([1e-3,1e-2])
    clip = r.choice([None,None,0.01,0.1])
    how = r.choice(['fit','one_cycle','one_cycle','flat_cos','sgdr','fine_tune','resumed','two_fits'])
    return dict(micro=micro, macro=macro, n=n, seed=seed, tokens=r.random()<0.3, shuffle=r.random()<0.5,
        loader_drop_last=loader_drop_last,
        acc=dict(drop_last=drop_last), opt_func=opts[opt], metrics=accuracy if r.random()<0.3 else None,
        fit=partial(fit, how=how, n_epoch=r.randint(1, 3), lr=lr, wd=r.choice([None,0.,0.1]),
        frozen_first=r.random()<0.2),
        cbs=list if clip is None else partial(lambda o: [GradientClip(o)], clip))

def check(seed):
    "Run the twins of configuration `seed`; return how far they are apart"
    cfg = draw(seed)
    if cfg['tokens']: cfg['metrics'] = None
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', message='micro-batches of')
        try: return assert_twins(*twins(**cfg))
        except Exception as e: raise AssertionError(f"seed {seed}, {cfg}: {e}") from e

def worst(results):
    "The largest of each deviation"
    results = list(results)
    return {k:max(o[k] for o in results) for k in results[0]}

def main(n, workers=os.cpu_count()):
    from fastprogress.fastprogress import progress_bar
    torch.set_num_threads(1)
    with ProcessPoolExecutor(workers, mp_context=get_context('spawn'), initializer=torch.set_num_threads,
            initargs=(1,)) as pool:
        res = list(progress_bar(pool.map(check, range(n), chunksize=20), total=n))
    print(f'\n{len(res)} twins, largest deviations:')
    for k,v in worst(res).items(): print(f'  {k:10} {v:.1e}')

def number(s):
    "How many twins are asked for"
    if not s.isdecimal() or int(s)<1: sys.exit(f'N={s}: give a number of twins, at least 1')
    return int(s)

if __name__=='__main__': main(number(sys.argv[1]) if len(sys.argv)>1 else 1000)
