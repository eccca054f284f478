"Learning rates that follow the size of a step: each step has the rate it should, and nothing else changes."
import math
from functools import partial
import pytest, torch
from fastai.callback.core import Callback, CancelTrainException
from fastai.callback.schedule import lr_find
from fastai.callback.tracker import ReduceLROnPlateau
from fastai.callback.training import GradientClip
from fastai.optimizer import Adam, OptimWrapper, SGD, debias
from fastaccum import (GradientAccumulation, GradientAccumulationSchedule, GradientAccumulationScheduler, NoiseScale,
    ScaledLR)
from fastaccum.noise.rates import Loan, gain, scale_beta
from fastaccum.testing import assert_twins, toy, toy_data
from common import Raise, Seen, weights
from test_noise import Scaled

opts = dict(sgd=partial(SGD, mom=.9), adam=Adam, torchs=partial(OptimWrapper, opt=torch.optim.AdamW),
    torchs_sgd=partial(OptimWrapper, opt=torch.optim.SGD))
fits = dict(one_cycle=lambda l,cbs: l.fit_one_cycle(2, slice(1e-3, .1), cbs=cbs),
    plain=lambda l,cbs: l.fit(2, slice(1e-3, .1), cbs=cbs), flat_cos=lambda l,cbs: l.fit_flat_cos(2, .1, cbs=cbs),
    sgdr=lambda l,cbs: l.fit_sgdr(2, 1, .1, cbs=cbs))

def used(opt_func=SGD): return Seen('before_step', lambda l: [dict(h) for h in l.opt.hypers], order=100)

@pytest.mark.parametrize('opt_func', opts)
@pytest.mark.parametrize('fit', ['one_cycle','plain'])
@pytest.mark.parametrize('rule', ['linear','sqrt','adascale'])
def test_one_is_the_identity(opt_func, fit, rule):
    betas = rule=='sqrt' and opt_func in ('adam','torchs')
    def run(*cbs):
        learn = toy(4, n=70, opt_func=opts[opt_func])
        fits[fit](learn, [GradientAccumulation(16), NoiseScale(every=2), *cbs])
        return learn
    a,b = run(),run(ScaledLR(16, rule, betas=betas))
    assert torch.equal(weights(a), weights(b)) and a.recorder.lrs==b.recorder.lrs
    assert getattr(a.recorder, 'hps', 0)==getattr(b.recorder, 'hps', 0)

@pytest.mark.parametrize('opt_func', opts)
@pytest.mark.parametrize('fit', fits)
def test_each_step_has_its_rate_times_the_factor(opt_func, fit):
    "In all groups, for fastai's optimizers and torch's; and the Recorder has what was used"
    def run(*cbs):
        learn,seen = toy(4, n=70, opt_func=opts[opt_func]),used()
        fits[fit](learn, [GradientAccumulation(16), seen, *cbs])
        return learn,seen.values
    (a,base),(b,mine) = run(),run(ScaledLR(4))
    assert len(base)==len(mine)>=10
    for o,m in zip(base, mine):
        assert [4*h['lr'] for h in o]==[h['lr'] for h in m]
        assert [{k:v for k,v in h.items() if k!='lr'} for h in o]==[{k:v for k,v in h.items() if k!='lr'} for h in m]
    assert b.recorder.lrs==[4*o for o in a.recorder.lrs]==[h[-1]['lr'] for h in mine]
    if 'lr' in getattr(a.recorder, 'hps', {}): assert b.recorder.hps['lr']==[4*o for o in a.recorder.hps['lr']]
    assert [h['lr'] for h in a.opt.hypers]==[h['lr'] for h in b.opt.hypers]

@pytest.mark.parametrize('opt_func', ['adam','torchs'])
@pytest.mark.parametrize('betas', [False,True,'half_life'])
def test_adam(opt_func, betas):
    learn,seen = toy(4, n=64, opt_func=opts[opt_func]),used()
    learn.create_opt()
    before = [dict(h) for h in learn.opt.hypers]
    learn.fit(1, .01, wd=.1, cbs=[GradientAccumulation(16), ScaledLR(8, 'sqrt', betas=betas), seen])
    for h,o in zip(seen.values[0], before):
        assert math.isclose(h['lr'], .01*2**.5) and math.isclose(h['eps'], o['eps']/2**.5)
        b1,b2 = h['mom'],h['sqr_mom']
        if not betas: assert (b1,b2)==(o['mom'],o['sqr_mom'])
        elif betas is True: assert math.isclose(b1, 2*o['mom']-1) and math.isclose(b2, 2*o['sqr_mom']-1)
        else: assert b1==o['mom'] and math.isclose(b2, o['sqr_mom']**2)
    assert [h['sqr_mom'] for h in learn.opt.hypers]==[h['sqr_mom'] for h in before]
    assert [h['eps'] for h in learn.opt.hypers]==[h['eps'] for h in before]

def test_one_leaves_every_beta_alone():
    assert all(scale_beta(o, 1, half_life)==o for o in (.1,.3,.7,.99,.99999) for half_life in (False,True))

def test_a_loan_that_is_taken_twice_is_given_back_once():
    learn = toy(4, n=8)
    learn.create_opt()
    before,loan = learn.opt.hypers[0]['lr'],Loan(learn.opt)
    for o in (2.,3.): loan.enter([dict(lr=o)]*len(learn.opt.hypers))
    assert learn.opt.hypers[0]['lr']==3.
    loan.leave()
    assert learn.opt.hypers[0]['lr']==before

def test_an_accumulation_that_is_switched_off_does_not_count():
    learn,acc = toy(4, n=16),GradientAccumulation(16)
    acc.run = False
    learn.fit(1, .01, cbs=[acc, ScaledLR(2)])
    assert learn.recorder.lrs==[.02]*4

def test_each_fit_begins_without_a_factor():
    learn,scale = toy(4, n=16),ScaledLR(2)
    for _ in range(2):
        seen = Seen('before_batch', lambda l: (scale.kappa,scale.factor,scale.values), order=100)
        learn.fit(1, .01, cbs=[scale,seen])
        assert seen.values[0]==(None,None,()) and seen.values[1][:2]==(2,2)

def test_the_factor_follows_a_schedule():
    learn = toy(4, n=64)
    learn.fit(3, .01, cbs=[GradientAccumulationSchedule(8, 32, start=0, finish=2), ScaledLR(8)])
    assert learn.recorder.lrs==[.01*o/8 for o in learn.recorder.accum_bs] and len(set(learn.recorder.lrs))>2
    learn.fit(2, .01, cbs=[GradientAccumulationScheduler({0:2, 1:4}), ScaledLR(8)])
    assert learn.recorder.lrs==[.01]*8+[.02]*4

@pytest.mark.parametrize('remainder,last', [(False,16),(True,6)])
def test_the_remainder_of_an_epoch(remainder, last):
    learn = toy(4, n=70)
    learn.fit(2, .01, cbs=[GradientAccumulation(16), ScaledLR(8, remainder=remainder)])
    assert learn.recorder.lrs==[.01*n/8 for n in (16,16,16,16,last)*2]

def test_an_epoch_that_has_not_as_many():
    learn = toy(4, n=20)
    learn.fit(1, .01, cbs=[GradientAccumulation(1000), ScaledLR(10)])
    assert learn.recorder.lrs==[.02]

@pytest.mark.parametrize('remainder,last', [(False,4),(True,2)])
def test_without_accumulation(remainder, last):
    learn = toy(4, n=14)
    learn.fit(2, .01, cbs=ScaledLR(2, remainder=remainder))
    assert learn.recorder.lrs==[.01*n/2 for n in (4,4,4,last)*2] and learn.opt.hypers[-1]['lr']==.01

@pytest.mark.parametrize('cbs', [list, lambda: [GradientClip(.05)],
    lambda: [Scaled(init_scale=2.**10), GradientClip(.05)]], ids=['plain','clipped','scaled and clipped'])
@pytest.mark.parametrize('kwargs', [dict(), dict(tokens=True), dict(opt_func=Adam)], ids=['sgd','tokens','adam'])
def test_the_run_is_that_of_the_big_batch(cbs, kwargs):
    "...with the rate that it would be given"
    def run(bs, lr, *own):
        learn = toy(bs, n=70, **kwargs)
        learn.fit_one_cycle(2, lr, cbs=[*own, *cbs()])
        return learn
    a = run(16, .04)
    for b in (run(4, .01, GradientAccumulation(16), ScaledLR(4)),run(16, .01, ScaledLR(4))):
        b.opt.set_hyper('lr', [4*h['lr'] for h in b.opt.hypers])   # they were put back
        assert_twins(a, b)

def test_a_skipped_step_has_an_entry():
    class Overflow(Callback):
        order,run_valid = 9,False
        def before_backward(self):
            if self.iter==1: self.learn.loss_grad = self.loss_grad*float('inf')
    learn = toy(4, n=64)
    learn.fit(1, .01, cbs=[GradientAccumulation(16), ScaledLR(8), Scaled(init_scale=2.**10), Overflow()])
    assert learn.recorder.lrs==[.02]*4 and learn.opt.hypers[0]['lr']==.01

def test_training_that_ends_early():
    "The step on what is in hand has the factor, too"
    learn,seen = toy(4, n=64),used()
    raises = Raise('after_batch', CancelTrainException, 100, at=5)
    learn.fit(1, .01, cbs=[GradientAccumulation(16), ScaledLR(8), seen, raises])
    assert [h[0]['lr'] for h in seen.values]==learn.recorder.lrs==[.02,.02] and learn.opt.hypers[0]['lr']==.01

@pytest.mark.parametrize('opt_func', ['adam','torchs'])
@pytest.mark.parametrize('event', ['before_batch','before_step','after_step','after_batch'])
@pytest.mark.parametrize('order', [6.5,100])
@pytest.mark.parametrize('kept', [False,True])
def test_interrupts_leave_nothing(opt_func, event, order, kept):
    learn = toy(4, n=64, opt_func=opts[opt_func])
    learn.create_opt()
    cbs = [GradientAccumulation(16), ScaledLR(4, 'sqrt', betas=True)]
    before = [dict(h) for h in learn.opt.hypers]
    if kept: learn.add_cbs(cbs)
    raises = Raise(event, KeyboardInterrupt, order, at=5 if event.endswith('batch') else 1)
    with pytest.raises(KeyboardInterrupt): learn.fit(1, .1, cbs=([] if kept else cbs)+[raises])
    if kept: learn.fit(1, .1)
    now = [dict(h) for h in learn.opt.hypers]
    def rest(hs): return [{k:v for k,v in h.items() if k not in ('lr','wd')} for h in hs]
    assert rest(now)==rest(before) and [h['lr'] for h in now]==[.1]*len(now)

def test_an_interrupt_and_the_rate_that_was_in_use():
    "A rate that happens to be what the interrupted fit had scaled it to is the user's"
    learn = toy(4, n=64, cbs=[GradientAccumulation(16), ScaledLR(4)])
    with pytest.raises(KeyboardInterrupt): learn.fit(1, .1, cbs=Raise('before_batch', KeyboardInterrupt, 1, at=4))
    learn.fit(1, .4)
    assert learn.recorder.lrs==[4*.4]*4 and learn.opt.hypers[0]['lr']==.4

def test_others_set_rates_too():
    "A callback that multiplies the rate it finds, in `after_batch` or after an epoch, does so once"
    class Halve(Callback):
        run_valid = False
        def after_batch(self):
            if self.gradient_accumulation.stepped:
                self.opt.set_hyper('lr', [h['lr']/2 for h in self.opt.hypers])
    learn = toy(4, n=64)
    learn.fit(1, .1, cbs=[GradientAccumulation(16), ScaledLR(4), Halve()])
    assert [round(o/.4, 9) for o in learn.recorder.lrs]==[1,.5,.25,.125]   # what was used
    assert math.isclose(learn.opt.hypers[0]['lr'], .1/16)
    learn = toy(4, n=64)
    plateau = ReduceLROnPlateau(patience=0, factor=2, min_delta=1e9)
    learn.fit(3, .1, cbs=[GradientAccumulation(16), ScaledLR(4), plateau])
    assert learn.recorder.lrs==[.4]*8+[.2]*4 and learn.opt.hypers[0]['lr']==.025

def test_lr_find_suggests_rates_for_the_base():
    def run(*cbs):
        learn = toy(4, n=64, cbs=[GradientAccumulation(16), *cbs])
        learn.lr_find(num_it=10, show_plot=False)
        return learn.recorder.lrs
    seen = used()
    mine = run(ScaledLR(4), seen)
    assert mine==run() and [h[-1]['lr'] for h in seen.values][:len(mine)]==[4*o for o in mine]

def test_log_accum_batch_off():
    learn = toy(4, n=64)
    learn.fit(1, .01, cbs=[GradientAccumulation(16, log_accum_batch=False), ScaledLR(4)])
    assert learn.recorder.lrs==[.01,.01,.01,.04]*4

# AdaScale

def test_adascale_follows_the_meter():
    learn,meter,seen = toy(4, n=128),NoiseScale(every=2),used()
    scale = ScaledLR(4, 'adascale')
    known = Seen('before_step', lambda l: (meter.trace,meter.grad_sq), order=8)
    learn.fit(1, .01, cbs=[GradientAccumulation(16), meter, scale, known, seen])
    want = [.01*gain(t/4, g, 4) for t,g in known.values]
    assert want[0]==.01 and max(want)>.011
    assert [h[0]['lr'] for h in seen.values]==learn.recorder.lrs==want

def test_adascale_with_tokens():
    "The variance is that of a batch of samples, whatever is counted"
    ds = toy_data(64, tokens=True)
    ds.tensors[1].copy_(torch.where(ds.tensors[1]<0, -100, ds.tensors[0][...,:3].argmax(-1)))   # there is a signal
    learn,meter = toy(4, data=ds),NoiseScale(every=1)
    learn.fit(1, .01, cbs=[GradientAccumulation(16), meter, ScaledLR(4, 'adascale')])
    o = meter.readings[0]
    assert meter.unit=='targets' and o.size>o.samples
    trace,grad_sq = o.averages.sum(1)
    factor = gain(trace/(4*o.size/o.samples), grad_sq, 4)
    assert math.isclose(learn.recorder.lrs[1], .01*factor) and 1.1<factor<3.9

# Errors

@pytest.mark.parametrize('args,exc', [((0,),ValueError), ((2.5,),TypeError), ((8,'cubic'),ValueError),
    ((8,'sqrt','yes'),ValueError), ((8,'sqrt',True,(.9,.5)),ValueError), ((8,'sqrt',True,(.9,1)),ValueError),
    ((8,'linear',False,(.5,.9),1),TypeError)], ids=str)
def test_bad_arguments(args, exc):
    with pytest.raises(exc): ScaledLR(*args)

@pytest.mark.parametrize('args,match', [((8,'adascale'),'NoiseScale'), ((8,'sqrt',True),'is for Adam')], ids=str)
def test_errors_come_before_a_weight_moves(args, match):
    learn = toy(4)
    before = weights(learn)
    with pytest.raises(ValueError, match=match): learn.fit(1, cbs=[GradientAccumulation(16), ScaledLR(*args)])
    assert torch.equal(before, weights(learn))

@pytest.mark.parametrize('make', [lambda: ScaledLR(8),NoiseScale], ids=['scaled','noise'])
def test_two_of_them_are_refused(make):
    "The rate would be scaled twice, and the Recorder would have two entries per step"
    learn = toy(4, cbs=[GradientAccumulation(16), make()])
    before,metrics = weights(learn),list(learn.metrics)
    with pytest.raises(ValueError, match='keep one'): learn.fit(1, cbs=make())
    assert torch.equal(before, weights(learn)) and list(learn.metrics)==metrics
    learn.fit(1)
    assert learn.opt.hypers[0]['lr']==learn.lr

# What fastai does

def test_fit_sets_the_rate_before_callbacks_hear_of_it():
    "Canary: `before_fit` need not put back a learning rate, because `fit` has set it"
    seen = Seen('before_fit', lambda l: l.opt.hypers[0]['lr'], order=-100)
    learn = toy(4, n=16)
    learn.fit(1, .1)
    learn.opt.set_hyper('lr', 7.)
    learn.fit(1, .2, cbs=seen)
    assert seen.values==[.2]

def test_debias_takes_the_current_beta():
    "Canary: fastai divides by 1-β^t with the β of this step, and by 1-Πβ it should be; see the page"
    assert math.isclose(debias(.96, 1-.96, 51), 1-.96**51) and abs(debias(.96, 1-.96, 51)-(1-.99**50*.96))>.4
