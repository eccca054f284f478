"`ScaledLR` scales the learning rate of each step by its size, and restores the rate afterwards."
import math
from functools import partial
import pytest, torch
from fastai.vision.all import Adam, CancelTrainException, GradientClip, OptimWrapper, ReduceLROnPlateau, SGD
from fastaccum.all import *
from fastaccum.testing import assert_same_run, toy
from common import CpuMixedPrecision, RaiseAt, RecordAt, learnable_data, overflow_at_step, pick_cases, weights

opts = dict(sgd=partial(SGD, mom=.9), adam=Adam, adamw=partial(OptimWrapper, opt=torch.optim.AdamW),
    torchs_sgd=partial(OptimWrapper, opt=torch.optim.SGD))
fits = dict(fit_one_cycle=(2, slice(1e-3, .1)), fit=(2, slice(1e-3, .1)), fit_flat_cos=(2, .1), fit_sgdr=(2, 1, .1))
factors = dict(linear=4., sqrt=2.)

def hypers(learn, *but):
    "Return the hyper-parameters of each parameter group, without those in `but`"
    return [{k:v for k,v in h.items() if k not in but} for h in learn.opt.hypers]
def in_steps(): return RecordAt('before_step', hypers, order=100)
def rates(hs): return [h['lr'] for h in hs]
def close(a, b): return len(a)==len(b) and all(math.isclose(x, y, rel_tol=1e-12) for x,y in zip(a, b))

def run(opt, fit, *cbs):
    learn,seen = toy(4, n=70, opt_func=opts[opt]),in_steps()
    getattr(learn, fit)(*fits[fit], cbs=[GradientAccumulation(16), NoiseScale(every=2), seen, *cbs])
    return learn,seen.values

# The rates

@pytest.mark.parametrize('opt,fit,rule', pick_cases(10, [(o,f,r) for o in opts for f in fits for r in (*factors,None)]))
def test_each_step_has_the_scheduled_rate_times_the_factor(opt, fit, rule):
    """The factor is that of all parameter groups

    The Recorder has the scaled rates, and after the fit the optimizer has the unscaled rates again.
    """
    (a,base),(b,scaled) = run(opt, fit),run(opt, fit, ScaledLR(base_bs=4, rule=rule))
    rule = rule or ('sqrt' if 'adam' in opt else 'linear')
    assert len(base)==len(scaled)>=10
    for hs,js in zip(base, scaled):
        assert close(rates(js), [factors[rule]*o for o in rates(hs)])
        assert all(h[k]==j[k] for h,j in zip(hs, js) for k in h if k not in ('lr','eps'))
    assert close(b.recorder.lrs, [factors[rule]*o for o in a.recorder.lrs])
    assert b.recorder.lrs==[rates(o)[-1] for o in scaled] and hypers(a)==hypers(b)
    a,b = (getattr(o.recorder, 'hps', {}).get('lr', []) for o in (a,b))
    assert close(b, [factors[rule]*o for o in a])

@pytest.mark.parametrize('opt', opts)
@pytest.mark.parametrize('rule', factors)
def test_the_rate_of_a_step_of_the_base_size_does_not_change(opt, rule):
    (a,base),(b,scaled) = run(opt, 'fit_one_cycle'),run(opt, 'fit_one_cycle', ScaledLR(base_bs=16, rule=rule))
    assert torch.equal(weights(a), weights(b)) and base==scaled and a.recorder.lrs==b.recorder.lrs

@pytest.mark.parametrize('opt', ['adam','adamw'])
@pytest.mark.parametrize('kappa', [2,16])
def test_adams_epsilon_follows_the_root_rule(opt, kappa):
    "The betas do not change"
    learn,seen = toy(4, n=32, opt_func=opts[opt]),in_steps()
    learn.create_opt()
    before = hypers(learn, 'lr', 'wd')
    learn.fit(1, .01, .1, cbs=[GradientAccumulation(16), ScaledLR(base_bs=16//kappa, rule='sqrt'), seen])
    for h,o in zip(seen.values[0], before):
        assert close([h['lr'],h['eps']], [.01*kappa**.5,o['eps']/kappa**.5])
        assert all(h[k]==o[k] for k in ('mom','sqr_mom'))
    assert hypers(learn, 'lr', 'wd')==before

def acc(*args): return lambda: GradientAccumulation(*args)

@pytest.mark.parametrize('n,cbs,want', [(70,acc(16),[2]*10), (70,acc(18),[2.5]*8), (20,acc(1000),[2.5]*2),
    (14,list,[.5]*8), (64,lambda: GradientAccumulationScheduler({0:2, 1:4}),[1]*8+[2]*4),
    (64,lambda: [GradientAccumulation(16), CpuMixedPrecision(), overflow_at_step(1)],[2]*8)])
def test_the_rate_follows_the_size_of_a_whole_step(n, cbs, want):
    """The rate of a short step, or of one that overflows, is that of a whole step

    The size of a whole step is `accum_bs` rounded up to whole micro-batches, and at most an epoch.
    Without accumulation, it is the batch size.
    """
    learn = toy(4, n=n, cbs=cbs())
    learn.fit(2, .01, cbs=ScaledLR(base_bs=8))
    assert close(learn.recorder.lrs, [.01*o for o in want]) and learn.opt.hypers[-1]['lr']==.01

@pytest.mark.parametrize('kwargs', [{},dict(tokens=True, opt_func=Adam)], ids=['plain','tokens'])
def test_the_run_is_the_full_batch_run_with_the_scaled_rate(kwargs):
    def run(bs, lr, *own):
        learn = toy(bs, n=70, **kwargs)
        learn.fit_one_cycle(2, lr, cbs=[*own, GradientClip(.05)])
        return learn
    a = run(16, .04)
    own = partial(ScaledLR, base_bs=4, rule='linear')
    for b in (run(4, .01, GradientAccumulation(16), own()),run(16, .01, own())):
        # after a fit, the optimizer has the rate without the factor
        b.opt.set_hyper('lr', [4*h['lr'] for h in b.opt.hypers])
        assert_same_run(a, b)

# With other callbacks, and after the fit

halve = RecordAt('before_batch', lambda l: l.opt.set_hyper('lr', l.opt.hypers[0]['lr']/2), order=70)
# divides the rate by 2 after the second and the third epoch
plateau = ReduceLROnPlateau(patience=0, factor=2, min_delta=1e9)
sets = RecordAt('after_batch', lambda l: l.opt.set_hyper('lr', .1/2**len(l.recorder.lrs)), order=70)

@pytest.mark.parametrize('cb,want', [(plateau,[.4]*8+[.2]*4), (halve,[.4/2**i for i in range(1, 13)]),
    (sets,[.4/2**i for i in range(12)])], ids=['plateau','halves','sets'])
def test_a_rate_that_another_callback_changes_stays_changed(cb, want):
    learn = toy(16, n=64)
    learn.fit(3, .1, cbs=[ScaledLR(base_bs=4), cb])
    assert close(learn.recorder.lrs, want) and learn.opt.hypers[0]['lr']<want[-1]/4*1.01

def test_lr_find_suggests_rates_for_the_base_size():
    a,b,seen = toy(4, n=64),toy(4, n=64, cbs=ScaledLR(base_bs=4)),in_steps()
    for o in (a,b):
        with o.added_cbs([GradientAccumulation(16), seen]): o.lr_find(num_it=8, show_plot=False)
    lrs,used = a.recorder.lrs,[rates(h)[-1] for h in seen.values]
    assert lrs==b.recorder.lrs and close(used[len(used)//2:][:len(lrs)], [4*o for o in lrs])

@pytest.mark.parametrize('event', ['before_step','after_step'])   # in these events, the rate is scaled
@pytest.mark.parametrize('on_learner', [False,True])
@pytest.mark.parametrize('exc', [KeyboardInterrupt,CancelTrainException])
def test_nothing_is_left_after_an_interrupt(event, on_learner, exc):
    "The next fit has the rate that it is given, even if that equals the scaled rate at the interrupt"
    learn = toy(4, n=64, opt_func=Adam)
    learn.create_opt()
    before,own = hypers(learn, 'lr', 'wd'),[GradientAccumulation(16),ScaledLR(base_bs=4, rule='sqrt')]
    raises = RaiseAt(event, exc, 100, skip=1)
    if on_learner: learn.add_cbs(own)
    try: learn.fit(1, .1, cbs=[raises, *([] if on_learner else own)])
    except KeyboardInterrupt: pass
    if on_learner:
        learn.fit(1, .2)
        assert close(learn.recorder.lrs, [.4]*4)
    assert raises.raised and hypers(learn, 'lr', 'wd')==before
    assert rates(learn.opt.hypers)==[.2 if on_learner else .1]*len(before)
