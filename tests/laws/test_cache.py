"`GradientCache` passes parts of a batch to the model and whole batches to the loss, in the same run."
import os, pytest, random, torch, warnings
from copy import deepcopy
from functools import partial
from hypothesis import given, strategies as st
from itertools import product
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils._pytree import tree_leaves
from fastai.callback.rnn import RNNRegularizer
from fastai.vision.all import (Adam, Callback, CancelBatchException, GradientClip, Module, OptimWrapper, TensorImage,
    accuracy, set_seed)
from fastaccum import ActivationCheckpoint, FreezeBN, GradientAccumulation, GradientCache
from fastaccum.testing import CrossEntropy, assert_same_run, deviation, one_cycle, toy, toy_data
from common import (CallAt, CpuLossScaling, CpuMixedPrecision, LimitedMemory, RaiseAt, RecordAt, batch_dice_loss,
    collect_warnings, grads, nt_xent, overflow_at_step, runs_out_above, runs_out_on_attempts, weights,
    with_float32_inputs)
from small_learners import (DoubleMixUp, MixUpLoss, StatefulLinear, all_params, applications, logits_of,
    make_application, replaced_methods)

def Cached(n, **kwargs): return GradientCache(micro_batch_size=n, **kwargs)

def in_place(z, y): return nt_xent(z.mul_(2).sigmoid_())

# Callbacks that change the loss or call the model

def penalty(l):
    "Add a penalty on the predictions, and one on the weights, whose gradient bypasses the predictions"
    l.loss_grad = l.loss_grad+0.1*sum(p.pow(2).sum() for p in l.model.parameters())+0.1*l.pred.pow(2).mean()
def penalties(): return [CallAt('after_pred', lambda l: setattr(l, 'pred', l.pred*1.5)),CallAt('after_loss', penalty)]

def input_gradient(l, **kwargs):
    "Call the model on the whole batch, and return the gradient of the loss with respect to the inputs"
    x = l.x.clone().requires_grad_()
    return torch.autograd.grad(nt_xent(l.model(x)), x, **kwargs)[0]
def adversary(l): l.xb = (l.x+0.1*input_gradient(l).sign(),)
def penalise_input_gradient(l): l.loss_grad = l.loss_grad+input_gradient(l, create_graph=True).pow(2).sum()
def calls_of_the_model(): return [CallAt('before_batch', adversary),CallAt('after_loss', penalise_input_gradient)]

def scaled(): return [CpuLossScaling(init_scale=2.**10, growth_interval=3),overflow_at_step(1)]

def net(*more):
    return nn.Sequential(nn.Linear(5,6), *more, nn.Tanh(), nn.Linear(6,6), nn.Tanh(), nn.Linear(6,3)).double()

def fit(cbs, bs=16, fit=one_cycle, seed=0, **kwargs):
    "Return a Learner with the loss `nt_xent` after a fit with these callbacks"
    learn = toy(bs, **dict(dict(seed=seed, n=41, loss_func=nt_xent, splitter=all_params), **kwargs))
    with learn.added_cbs(cbs): learn.validate()   # validation must also work before the first fit
    set_seed(seed)
    fit(learn, cbs)
    return learn

same = partial(assert_same_run, tol=1e-10)
ways = dict(cached=lambda: Cached(5), auto=lambda: Cached('auto'), checkpointed=ActivationCheckpoint)
def assert_same(way=ways['cached'], cbs=list, **kwargs):
    "Fail if the run with the callback differs from the run without it"
    a,b = (fit([*o,*cbs()], **kwargs) for o in ([],[way()]))
    same(a, b)
    assert replaced_methods(b)==replaced_methods(a)

# The run is the full-batch run

def one_epoch(l, cbs): l.fit_one_cycle(1, 0.1, cbs=cbs)
@given(st.integers(1, 30), st.integers(2, 30), st.integers(30, 60), st.integers(0, 9), st.booleans(),
    st.sampled_from([nt_xent,batch_dice_loss,CrossEntropy()]))
def test_the_run_is_the_same_with_any_loss_and_any_sizes(size, bs, n, seed, shuffle, loss):
    assert_same(lambda: Cached(size), bs=bs, n=n, seed=seed, shuffle=shuffle, loss_func=loss, fit=one_epoch)

def accumulated(): return GradientAccumulation(32, drop_last=False)
def fits(l, cbs):
    "Fit in two ways, and record validation and predictions"
    with l.added_cbs(cbs):
        l.fine_tune(1, 0.05, freeze_epochs=1)
        l.fit_flat_cos(1, 0.05)
        l.recorder.values.append([l.validate(),l.get_preds()[0]])
def lr_find(l, cbs):
    with l.added_cbs(cbs): l.lr_find(num_it=7, show_plot=False, suggest_funcs=None)
    assert len(l.recorder.lrs)==7

def two_groups(m): return [[*m[:2].parameters()],[*m[2:].parameters()]]
settings = dict(adam=dict(opt_func=Adam, metrics=accuracy, cbs=lambda: [GradientClip(0.05)]),
    adamw=dict(opt_func=partial(OptimWrapper, opt=torch.optim.AdamW)), in_place=dict(loss_func=in_place),
    scaler=dict(cbs=scaled), penalties=dict(cbs=penalties),
    calls=dict(cbs=calls_of_the_model), fits=dict(fit=fits, splitter=two_groups), lr_find=dict(fit=lr_find),
    compiled=dict(model=lambda: torch.compile(net(), backend='eager', dynamic=True)),
    mixup=dict(cbs=lambda: [DoubleMixUp()], loss_func=MixUpLoss()),
    accumulated=dict(cbs=lambda: [accumulated()], n=75, metrics=accuracy),
    all=dict(cbs=lambda: [accumulated(),*scaled(),GradientClip(0.05),*penalties()], n=75))

@pytest.mark.parametrize('way,nm', [(way,nm) for way in ('cached','checkpointed') for nm in settings
    if (way,nm)!=('checkpointed','compiled')])   # a compiled model has no segments
def test_the_run_is_the_same_with_other_callbacks_and_models(way, nm):
    "With checkpoints, the model has dropout and BatchNorm; test_checkpoint.py has more cases"
    model = dict(model=lambda: net(nn.BatchNorm1d(6), nn.Dropout())) if way=='checkpointed' else {}
    assert_same(ways[way], **model|settings[nm])

# What the model and the callbacks see

def test_the_model_sees_micro_batches_and_callbacks_see_the_batch():
    "The same holds in validation and prediction; a hook on the model itself sees the whole batch"
    seen,hooked,preds = [],[],RecordAt('after_pred', lambda l: len(l.pred))
    learn = toy(16, n=32, loss_func=nt_xent, cbs=Cached(5))
    learn.model.register_forward_hook(lambda m,i,o: hooked.append((len(i[0]),len(o))))
    learn.model[1].register_forward_hook(lambda m,i,o: seen.append(len(o)))
    learn.fit(1, 0.1, cbs=preds)
    learn.validate()
    assert learn.get_preds()[0].shape==(32,3)
    assert preds.values==[16]*2 and hooked==[(16,16)]*2+[(32,32)]*3
    # each batch of 16 is split into four parts of 4 samples, and all but the last part run twice
    assert max(seen)<=5 and seen.count(4)>=2*(2*4-1)
    learn.gradient_cache.run = False
    seen.clear()
    learn.fit(1, 0.1)
    assert seen==[16,16,32]

# Random numbers, and state that a forward pass changes

class InParts(Module):
    "In training, applies the model `m` to parts of `size` samples, with one graph of all parts"
    def __init__(self, m, size): self.m,self.size = m,size
    def forward(self, x): return torch.cat([self.m(o) for o in x.split(self.size)]) if self.training else self.m(x)

# layers that draw random numbers, or whose state a forward pass changes
changing_layers = dict(dropout=lambda: nn.Dropout(0.7), batchnorm=lambda: nn.BatchNorm1d(6),
    own=lambda: StatefulLinear(6),
    spectral=lambda: spectral_norm(nn.Linear(6, 6), n_power_iterations=2))

@pytest.mark.filterwarnings('ignore:BatchNorm1d normalizes')
@pytest.mark.parametrize('nm,size', list(product(changing_layers, [2,8])))
def test_the_run_is_that_of_one_forward_pass_over_each_part(nm, size):
    """The second forward pass repeats the random numbers of the first and changes no buffer

    The loss draws others.
    """
    def noisy(z, y): return nt_xent(z+0.1*torch.randn_like(z))
    def run(model, cbs):
        drawn = RecordAt('after_batch', lambda _: (torch.rand(1).item(), random.random()))
        learn = fit([*cbs,drawn], n=48, model=model, loss_func=noisy)
        learn.recorder.values.append(drawn.values)
        return learn
    def model(): return net(changing_layers[nm]())
    a,b = run(lambda: InParts(model(), size), []),run(model, [Cached(size)])
    a.model = a.model.m
    same(a, b)
    if nm=='own': assert deviation(*(l.model[1].state() for l in (a,b)))==0

def test_a_size_above_the_batch_size_splits_nothing_and_is_warned_of():
    for size,n_warnings in ((4,0), (8,0), (16,1)):
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter('always')
            toy(8).fit(1, .1, cbs=GradientCache(micro_batch_size=size))
        assert sum('so nothing is split' in str(o.message) for o in given)==n_warnings

def test_a_forward_pass_that_cannot_be_repeated_is_warned_of():
    class DrawsFromSystem(nn.Module):
        "Draws random numbers from the operating system, whose state cannot be restored"
        def forward(self, x): return x*torch.tensor([o/255 for o in os.urandom(x.shape[-1])], dtype=x.dtype)
    with pytest.warns(UserWarning, match='got different outputs'):
        fit([Cached(5)], model=lambda: net(DrawsFromSystem()))

@pytest.mark.parametrize('more', [[],[accumulated]])
def test_batchnorm_is_warned_of_once_for_a_learner(more):
    learn = toy(16, n=32, model=lambda: net(nn.BatchNorm1d(6)), cbs=[Cached(8),*(o() for o in more)])
    with pytest.warns(UserWarning, match='BatchNorm.*ActivationCheckpoint') as said: learn.fit(2, 0.1)
    assert sum('BatchNorm' in str(o.message) for o in said)==1
    with collect_warnings() as said: learn.fit(2, 0.1)
    assert not any('BatchNorm' in str(o.message) for o in said)

@pytest.mark.parametrize('mode,penalty,way', list(product(['fp16','bf16'], [False,True], ['cached','checkpointed'])))
def test_in_mixed_precision_the_run_differs_by_the_rounding_of_mixed_precision(mode, penalty, way):
    "Both forward passes have one precision, even if a penalty uses weights that autocast has cast"
    def on_weights(l): l.loss_grad = l.loss_grad+(torch.eye(6)@l.model[2].weight).float().pow(2).mean()
    def run(half, *cbs):
        seen = []
        def model():
            m = net().float()
            m[0].register_forward_hook(lambda m,i,o: seen.append(o.dtype.itemsize) if m.training else None)
            return m
        more = [CpuMixedPrecision(mode)]*half+[CallAt('after_loss', on_weights)]*penalty
        learn = fit([*more,*cbs], data=with_float32_inputs(toy_data(41)), model=model)
        assert set(seen)=={2 if half else 4} and None not in grads(learn)
        return learn
    single,a,b = run(False),run(True),run(True, ways[way]())
    for f in (weights,lambda l: l.recorder.losses):
        assert deviation(f(a), f(b))<=(2*deviation(f(a), f(single)) if way=='cached' else 0)

# Inputs and outputs of all kinds

class Towers(Module):
    """A model like CLIP, with a learned temperature

    Some outputs have no rows or no gradient, or the loss does not use them. One output, `protos`, has 4
    rows that are no samples, although a micro-batch may also have 4 samples.
    """
    def __init__(self, out):
        self.a,self.b,self.scale,self.out = net(),net(),nn.Parameter(torch.tensor(0.7).double()),out
        self.protos = nn.Parameter(torch.randn(4, 3).double())
    def forward(self, x, text):
        a,b = self.a(x.mul_(0.5)),self.b(text['ids'])   # changes the input in place
        res = None,a,b,self.scale.exp(),self.protos*2,x.argmax(-1),a.detach(),'clip',[a*2,(b*3,)]
        return self.out(enumerate(res if self.training else res[:7])) if self.out is dict else res

def clip_loss(out, y):
    _,a,b,scale,protos = tree_leaves(out)[:5]
    sim,y = scale*F.normalize(a)@F.normalize(b).T,torch.arange(len(a))
    return F.cross_entropy(sim, y)+F.cross_entropy(sim.T, y)+F.cross_entropy(a@protos.T, y%4)

class Pairs(Callback):
    "Adds a second input, a dict with a list of names, and turns the first into a tensor type of fastai"
    order = 10
    def before_batch(self):
        x = self.x.as_subclass(TensorImage)
        x.img_size = 7
        self.learn.xb = x,dict(ids=self.x.roll(1, -1), names=['a']*len(x))

@pytest.mark.parametrize('out,size', list(product([dict,tuple], [1,5])))
def test_inputs_and_outputs_of_all_kinds_are_split_and_joined(out, size):
    def known(o): return type(o),o.shape,o.requires_grad,o.tolist() if o.dtype==torch.int64 else vars(o)
    def look(l): return type(l.pred),[known(o) if isinstance(o, torch.Tensor) else o for o in tree_leaves(l.pred)]
    seen = [RecordAt('after_pred', look) for _ in range(2)]
    order = iter(seen)
    assert_same(lambda: Cached(size), lambda: [Pairs(),next(order)], model=lambda: Towers(out), loss_func=clip_loss)
    assert seen[0].values==seen[1].values and len(seen[0].values)==6

def test_inputs_that_need_a_gradient_get_one():
    "Here the inputs come from an encoder that is not part of the model"
    def run(*cbs):
        encoder,got = nn.Linear(5, 5).double(),[]
        with torch.no_grad():
            encoder.weight.copy_(torch.eye(5))
            encoder.bias.zero_()
        note = CallAt('after_backward', lambda l: got.append(encoder.weight.grad.clone()))
        learn = fit([CallAt('before_batch', lambda l: setattr(l, 'xb', (encoder(l.x),)), run_valid=True),note,*cbs])
        learn.recorder.values.append(got)
        return learn
    same(run(), run(Cached(5)))

def test_a_loss_of_activations_inside_the_model_is_refused():
    def loss(z, y): return nt_xent(z)+inner[-1].pow(2).mean()
    inner,learn = [],toy(16, n=32, loss_func=loss, model=net)
    learn.model[2].register_forward_hook(lambda m,i,o: inner.append(o))
    with pytest.raises(RuntimeError, match='second time'): learn.fit(1, 0.1, cbs=Cached(4))

def test_texts_whose_chunks_fastai_leaves_out_are_warned_of():
    def n_warnings(pad):
        learn = make_application('text_classifier', loss_func=lambda out,*_: nt_xent(logits_of(out))).add_cb(Cached(3))
        def end(l):
            # 1 is padding; the third chunk of 4 tokens begins at 8
            for i in pad[:len(l.x)]: l.x[i%len(l.x),8:] = 1
        with collect_warnings() as collected: learn.fit(1, cbs=CallAt('before_batch', end))
        words = 'SentenceEncoder','ActivationCheckpoint'
        return sum(all(w in str(o.message) for w in words) for o in collected)
    assert [n_warnings(o) for o in ((),(6,7),(2,))]==[0,0,1]

@pytest.mark.filterwarnings('ignore:there is no BatchNorm')
@pytest.mark.parametrize('nm', applications)
def test_the_cache_does_not_change_the_run_of_an_application(nm):
    "BatchNorm is frozen and dropout is 0, because both would depend on the micro-batch"
    loss = dict(unet=batch_dice_loss, language_model=CrossEntropy()).get(nm, lambda out,*_: nt_xent(logits_of(out)))
    def run(*cbs):
        learn = make_application(nm, loss_func=loss)
        for m in learn.model.modules():
            if nm in ('gpt2','t5') and hasattr(m, 'config'): m.config.use_cache = False
        before = weights(learn)
        learn.fit_one_cycle(1, 1e-3, cbs=[*cbs,FreezeBN()])
        assert not weights(learn).allclose(before, atol=1e-4) and len(learn.recorder.losses)>1
        return learn
    assert_same_run(run(), run(Cached(3)))

# Refused

class Returns(Module):
    "A model that returns `f(output, *more_inputs)`"
    def __init__(self, f): self.m,self.f = net(),f
    def forward(self, x, *more): return self.f(self.m(x), *more)

def total(z, y): return sum(o.sum() for o in tree_leaves(z) if isinstance(o, torch.Tensor))
def returning(f): return dict(model=lambda: Returns(f), loss_func=total)
# callbacks that add an input which has no row for each sample, and a model that takes this input
def scale(l): l.xb = l.x,torch.tensor([1.,2.,3.]).double()
def scales(): return CallAt('before_batch', scale, run_valid=True)
def scaling(): return Returns(lambda z,scale: z*scale)
def doubled(l): [p.detach().mul_(2) for p in l.model.parameters()]
def hooked():
    m = net()
    m[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    return m

refused = dict(pairs=(TypeError,'pairs|row for each',returning(lambda z: z@z.T)),
    loss=(TypeError,r'shape \(\)',returning(lambda z: z.mean())), T=(TypeError,r'shape \(3, ',returning(lambda z: z.T)),
    object=(TypeError,'returned a object',returning(lambda z: (z,object()))),
    inputs=(TypeError,r'shape \(3,\).*cannot be split.*split=',dict(model=scaling, cbs=scales())),
    batch=(RuntimeError,'changed in place',dict(cbs=CallAt('after_pred', lambda l: l.x.add_(1)))),
    weights=(RuntimeError,'changed in place',dict(cbs=CallAt('before_backward', doubled))),
    twice=(RuntimeError,'twice',dict(cbs=CallAt('after_loss', lambda l: l.loss_grad.backward(retain_graph=True)))),
    steps_in_the_backward_pass=(ValueError,"'0.weight' has a hook",dict(model=hooked)))

@pytest.mark.parametrize('nm', refused)
def test_what_needs_the_whole_batch_in_the_model_is_refused(nm):
    "No weight changes, except in the case 'weights', in which a callback doubles the weights itself"
    exc,match,kwargs = refused[nm]
    learn = toy(16, n=32, splitter=all_params, **kwargs)
    before = weights(learn)
    with pytest.raises(exc, match=match): learn.fit(1, 0.1, cbs=Cached(4))
    assert not replaced_methods(learn) and weights(learn).equal(before)==(nm!='weights')
    if exc is TypeError: learn.fit(1, 0.1)   # a fit without the cache runs

def test_inputs_are_split_by_a_split_function():
    def split(o, start, stop, n): return o[0][start:stop],o[1]
    same(*(fit([*cbs,scales()], model=scaling) for cbs in ([],[Cached(4, split=split)])))

# Nothing is left behind by the cache and by checkpoints; test_nothing_left.py has more cases

@pytest.mark.parametrize('way', ways)
@pytest.mark.parametrize('event', ['before_batch','after_pred','after_loss','after_backward','before_step'])
def test_a_cancelled_batch_leaves_the_rest_of_the_run_the_same(event, way):
    "The rest of the run is that of a fit without the cache or checkpoints"
    assert_same(ways[way], lambda: [RaiseAt(event, CancelBatchException, 20, skip=1)])

@pytest.mark.parametrize('way', [*ways.values(),partial(ActivationCheckpoint, nn.Linear)])
@pytest.mark.parametrize('event', ['after_pred','after_batch','after_epoch'])
def test_the_callback_can_be_removed_and_the_model_copied_within_a_fit(event, way):
    "A copy of the model that is made within the fit, such as for averaged weights, is a plain model"
    cb,copied,seen = way(),[],[]
    def copy_and_remove(l):
        copied.append(deepcopy(l.model))
        if l.epoch==1 and cb in l.cbs: l.remove_cb(cb)
    learn = fit([CallAt(event, copy_and_remove)], fit=lambda l,cbs: one_cycle(l.add_cb(cb), cbs))
    assert not replaced_methods(learn) and cb not in learn.cbs
    same(fit([]), learn)
    m = copied[0]
    m[0].register_forward_hook(lambda m,i,o: seen.append(len(o)))
    m(torch.randn(16, 5).double()).sum().backward()
    assert seen==[16] and all(o.forward.__self__ is o for o in m.modules())

# `micro_batch_size='auto'`: memory runs out

@pytest.mark.parametrize('nm,stage,cap,size', [('adam','backward',5,4), ('penalties','forward',3,2),
    ('accumulated','backward',5,4), ('all','forward',5,4)])
def test_auto_finds_the_size_that_fits(nm, stage, cap, size):
    cache,more = Cached('auto'),dict(settings[nm])
    cbs = more.pop('cbs')
    def model(): return net(LimitedMemory(runs_out_above(cap, stage)))
    a = fit(cbs(), **more)
    with pytest.raises(RuntimeError, match='planted'): fit([Cached(8),*cbs()], model=model, **more)
    with pytest.warns(UserWarning, match=f'ran out .*at most {size} samples per micro-batch.*planted') as said:
        b = fit([cache,*cbs()], model=model, **more)
    same(a, b)
    assert cache.size==size and sum('memory ran out' in str(o.message) for o in said)==1

@pytest.mark.parametrize('attempts,acc', list(product([{0},{2},{3,9,14},None], [False,True])), ids=str)
@pytest.mark.filterwarnings('ignore:memory ran out')
def test_memory_may_run_out_in_the_middle_of_a_batch_or_a_step(attempts, acc):
    "Memory runs out in any backward pass, also after earlier ones of the step, or in validation"
    runs_out = runs_out_on_attempts(attempts, 'backward', 0) if attempts else runs_out_above(5, 'validation')
    def cbs(): return [accumulated()] if acc else []
    with pytest.warns(UserWarning, match='memory ran out'):
        b = fit([Cached('auto'),*cbs()], n=75, model=partial(net, LimitedMemory(runs_out)))
    same(fit(cbs(), n=75), b)

@pytest.mark.filterwarnings('ignore:memory ran out')
def test_a_fit_may_have_less_memory_than_an_earlier_fit():
    "The second fit begins with micro-batches of 8; memory runs out in its first backward pass"
    def fits(cache, caps=(99,99)):
        cap,learn = [],toy(16, n=48, loss_func=nt_xent, splitter=all_params,
            model=lambda: net(LimitedMemory(lambda stage, n: stage=='backward' and n>cap[-1])))
        for n in caps:
            cap.append(n)
            learn.fit(1, 0.1, cbs=cache)
        return learn
    cache = Cached('auto')
    same(fits([]), fits(cache, (8,4)))
    assert cache.size==4

@pytest.mark.filterwarnings('ignore:memory ran out')
def test_auto_halves_the_size_of_training_for_a_model_that_trains_in_evaluation_mode():
    attempts = iter(range(200))   # raises an error if the fit repeats a batch without end
    def runs_out(stage, n):
        next(attempts)
        return stage=='validation' and n>5
    def cbs(): return [CallAt('before_batch', lambda l: l.model.eval())]
    same(fit(cbs()), fit([Cached('auto'),*cbs()], model=lambda: net(LimitedMemory(runs_out))))

@pytest.mark.filterwarnings('ignore:memory ran out')
def test_the_halves_of_a_micro_batch_have_the_hidden_state_of_their_own_rows():
    "Memory runs out in the backward pass of the third batch, whose model keeps a state for each row"
    def run(cbs, *attempts):
        learn = make_application('language_model', loss_func=CrossEntropy())
        learn.remove_cb(RNNRegularizer)   # `RNNRegularizer` computes in single precision
        learn.model.insert(1, LimitedMemory(runs_out_on_attempts(attempts, 'backward')))
        learn.fit_one_cycle(2, 0.05, cbs=cbs)
        return learn
    same(run([]), run([Cached('auto')], 2))

@pytest.mark.filterwarnings('ignore:memory ran out')
def test_auto_draws_the_random_numbers_of_a_run_with_the_final_size():
    def run(cache, cap=99):
        memory = LimitedMemory(runs_out_above(cap, 'forward'))
        return fit([cache], n=48, model=lambda: net(nn.Dropout(), StatefulLinear(6), memory))
    same(run(Cached(4)), run(Cached('auto'), 5))
