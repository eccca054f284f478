"""A fit that is the full-batch run gives no warning. A fit that differs, or may differ, warns once.

With the remedy that the warning names, the fit is the full-batch run.
"""
import linecache, random, re, warnings
import numpy as np, pytest, torch
from collections import Counter
from functools import partial
from types import SimpleNamespace
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from fastai.text.all import (Adam, BCEWithLogitsLossFlat, CancelBatchException, CrossEntropyLossFlat, DataLoader,
    DataLoaders, DiceLoss, FocalLossFlat, GradientClip, LabelSmoothingCrossEntropyFlat, Learner, MSELossFlat, MixUp,
    Module, SGD, SortedDL, set_seed)
from fastaccum import (AccumulationWarning, FreezeBN, GradientAccumulation, GradientAccumulationSchedule,
    RecalibrateBN)
from fastaccum.restore import state
from fastaccum.testing import CrossEntropy, Float32Loss, assert_same_run, deviation, toy, toy_data, both_runs
from common import (BatchListLoader, CallAt, CpuMixedPrecision, LimitedMemory, RecordAt, batch_dice_loss,
    collect_warnings, in_chunks, nt_xent, runs_out_above, trim_padding, weights, weights_unchanged)
from small_learners import MixUpLoss, all_params

def count_warnings(f):
    """Count the warnings of fastaccum in `f()`, and return a Counter of pairs (category, entry)

    The category is the name of the warning's class, or '' if the class is no AccumulationWarning. The
    entry is that of the page Messages to which the warning links.
    """
    with collect_warnings() as collected: f()
    linked = [(o.category,str(o.message).partition('.html#')[2]) for o in collected]
    return Counter((c.__name__ if issubclass(c, AccumulationWarning) else '',entry) for c,entry in linked if entry)

# pairs (category, entry) that `count_warnings` counts
not_a_mean,not_tried = ('LossWarning','loss-not-a-mean'),('LossWarning','loss-not-tried')
batchnorm,hidden_state = ('BatchNormWarning','batchnorm'),('StateWarning','hidden-state')
loader_order = ('LoaderWarning','loader-order')

def fit(l, cbs): l.fit(2, 0.05, cbs=cbs)
def fit_small_rate(l, cbs): l.fit(2, 1e-3, cbs=cbs)   # the gradients of a sum are large
def cancel(): raise CancelBatchException

def warnings_and_runs(**kwargs):
    "Return the counted warnings of `both_runs`, and its two Learners: of full batches, of micro-batches"
    runs = []
    def train(): runs.extend(both_runs(**dict(n=70, fit=fit)|kwargs))
    return count_warnings(train),*runs

def weights_apart(a, b): return deviation(weights(a), weights(b))

# Models, losses and callbacks

def layers(*ms): return nn.Sequential(nn.Linear(5, 6), *ms, nn.Linear(6, 3)).double()
def with_batchnorm(mean=.1):
    bn = nn.BatchNorm1d(6)
    # `FreezeBN` takes a layer with a mean of 0 for a new layer, and warns of it
    bn.running_mean.fill_(mean)
    return layers(bn, nn.Tanh())
def with_norms_of_a_sample():
    "Return a model whose layers normalize each sample by itself"
    return layers(nn.GroupNorm(2, 6), nn.LayerNorm(6), nn.Unflatten(1, (2,3)), nn.InstanceNorm1d(2), nn.Flatten())

class Remembers(nn.Linear):
    "A layer that adds the sum of its previous outputs to its output, until `reset` clears the sum"
    total = torch.zeros(3).double()
    def reset(self): self.total = torch.zeros(3).double()
    def forward(self, x):
        res = super().forward(x)+self.total
        self.total = self.total+0.1*res.detach().mean(0)
        return res

class RemembersLittle(Remembers):
    "A layer whose previous outputs change its output by less than a hundredth"
    def forward(self, x):
        res = super().forward(x)
        self.total = self.total/12
        return res

class Masked(nn.Module):
    "A mean over targets that are not -100, in a module without an attribute `ignore_index`"
    def forward(self, p, y):
        keep = (y!=-100).flatten()
        return (F.cross_entropy(p.flatten(0, -2), y.flatten().clamp(min=0), reduction='none')*keep).sum()/keep.sum()

def not_ignored(l): return (l.y!=-100).sum()
def ignoring(p, y):
    """Return the mean over targets that are not -100

    fastaccum cannot see this, because a function has no attribute `ignore_index`.
    """
    return F.cross_entropy(p.flatten(0, -2), y.flatten())
def summed(p, y): return F.cross_entropy(p, y, reduction='sum')

class SumForMean(MixUpLoss):
    "A loss that is a sum although its `reduction` is 'mean'"
    def forward(self, p, y): return super().forward(p, y)*len(y)

def penalty(l): return sum(p.pow(2).sum() for p in l.model.parameters())
def adds(l): l.loss_grad = l.loss_grad+penalty(l)
def adds_in_place(l): l.loss_grad += penalty(l)
def adds_of_predictions(l): l.loss_grad = l.loss_grad+l.pred.pow(2).mean()
def doubles(l): l.loss_grad = l.loss_grad*2
def resets(event): return lambda: [CallAt(event, lambda l: l.model.reset(), run_valid=True)]

class MixesNeighbours(MixUp):
    "MixUp that mixes samples 2i and 2i+1 with each other, which are in the same micro-batch"
    def before_batch(self):
        self.yb1,self.lam = tuple(y.view(-1, 2).flip(1).flatten() for y in self.yb),torch.tensor(0.3).double()
def toy_for_mixup(*args, loss=MixUpLoss, **kwargs): return toy(*args, loss_func=loss(), **kwargs)

# Fits that are the full-batch run give no warning

sums = dict(loss_func=CrossEntropy(reduction='sum'), fit=fit_small_rate)
exact = dict(   # test_tokens.py has more losses
    plain=dict(), adam=dict(opt_func=Adam), one_cycle=dict(fit=lambda l,cbs: l.fit_one_cycle(1, 0.05, cbs=cbs)),
    ones=dict(micro=1), threes=dict(micro=3, n=71), split=dict(micro=8, acc=dict(micro_batch_size=2)),
    no_accumulation=dict(micro=16, loss_func=summed, model=with_batchnorm, fit=fit_small_rate),
    frozen_batchnorm=dict(model=with_batchnorm, cbs=lambda: [FreezeBN()]),
    norms_of_a_sample=dict(model=with_norms_of_a_sample), clipped=dict(tokens=True, cbs=lambda: [GradientClip(0.1)]),
    state_of_a_batch=dict(model=lambda: Remembers(5, 3).double(), splitter=all_params, cbs=resets('before_batch')),
    doubled=dict(cbs=lambda: [RecordAt('after_loss', doubles)]),
    penalised_sum_of_a_step=dict(micro=16, acc=dict(micro_batch_size='auto'),
        cbs=lambda: [RecordAt('after_loss', adds)], **sums))
exact |= {f'{f.__name__}_{event}':dict(tokens=True, cbs=lambda event=event,f=f: [RecordAt(event, f)])
    for event,f in (('after_loss',adds),('after_loss',adds_in_place),('before_backward',adds))}
exact |= {f'mixed_{r}':dict(n=64, make=partial(toy_for_mixup, loss=partial(MixUpLoss, reduction=r)), fit=fit_small_rate,
    cbs=lambda: [MixesNeighbours()]) for r in ('mean','sum')}

@pytest.mark.parametrize('nm', exact)
def test_a_fit_that_is_the_full_batch_run_gives_no_warning(nm):
    warnings_given,a,b = warnings_and_runs(**exact[nm])
    assert not warnings_given and assert_same_run(a, b)

# Losses of fastai and torch, and losses that compare samples

gen = torch.Generator().manual_seed(0)
def randn(*shape): return torch.randn(*shape, generator=gen)
def classes(*shape): return torch.randint(0, 5, shape, generator=gen)
# Predictions and targets of 32 samples
plain = randn(32, 5),classes(32)
values = randn(32, 3),randn(32, 3)
bits = randn(32, 5),classes(32, 5).clamp(max=1).float()
masks = randn(32, 5, 4, 4),classes(32, 4, 4)
padded = randn(32, 6, 5),classes(32, 6)
padded[1][:,2:][torch.rand(32, 4, generator=gen)<torch.rand(32, 1, generator=gen)] = -100
# some micro-batches have only targets of -100
few = plain[0],torch.where((torch.arange(32)-17).abs()>12, plain[1], -100)
w5 = torch.tensor([0.2,1.,5.,0.5,2.])

# Losses that are a mean or a sum over samples, and losses that are neither: (loss, predictions and
# targets), and for some a function that changes the structure of the predictions
right = dict(cross_entropy=(CrossEntropyLossFlat(), plain), class_weights=(CrossEntropyLossFlat(weight=w5), plain),
    smoothed=(LabelSmoothingCrossEntropyFlat(), plain), sum=(CrossEntropyLossFlat(reduction='sum'), plain),
    smoothed_weighted=(nn.CrossEntropyLoss(label_smoothing=.1, weight=w5), plain),
    padded=(CrossEntropyLossFlat(), padded), focal=(FocalLossFlat(weight=w5), plain), dice=(DiceLoss(), masks),
    masks=(CrossEntropyLossFlat(axis=1), masks), mse=(MSELossFlat(), values), huber=(nn.HuberLoss(), values),
    bce=(BCEWithLogitsLossFlat(), bits), pos_weight=(nn.BCEWithLogitsLoss(pos_weight=w5), bits),
    constant=(lambda p, y: F.cross_entropy(p, y)+9, plain),
    several=(lambda p, y: F.cross_entropy(p[0], y)+p[1].pow(2).mean(), plain, lambda p: (p,p[:,:3])),
    named=(lambda p, y: F.cross_entropy(p['logits'], y), plain, lambda p: dict(logits=p)),
    time_first=(lambda p, y: F.cross_entropy(p.mean(0), y), (randn(32, 20, 5),plain[1]), lambda p: p.transpose(0, 1)))
wrong = dict(hidden_mean=(Masked(), padded), sum_for_mean=(summed, plain),
    root=(lambda p, y: F.mse_loss(p, y).sqrt(), values), contrastive=(nt_xent, plain), dice=(batch_dice_loss, masks),
    smoothed_weighted=(LabelSmoothingCrossEntropyFlat(weight=w5), plain),
    spread=(lambda p, y: ((p-p.mean(0))**2).mean(), plain), few_labels=(lambda p, y: F.cross_entropy(p, y), few))
def of_16_at_least(p, y):
    if len(p)<16: raise ValueError('too few')
    return F.cross_entropy(p, y)
# To find out whether a loss is a mean over samples, fastaccum tries it: it compares the loss of a
# micro-batch with the losses of its parts. That is not possible with these losses, which draw random
# numbers or raise errors
untried = dict(torch_draws=lambda p, y: F.cross_entropy(p+torch.randn(p.shape), y),
    numpy_draws=lambda p, y: p.mean()*np.random.rand(), python_draws=lambda p, y: p.mean()*random.random(),
    raises=of_16_at_least)

class Scale(Module):
    """A model that returns `out(x*w)`

    Its weights `w` begin with 1, so its first predictions are its inputs.
    """
    def __init__(self, x, out): self.w,self.out = nn.Parameter(torch.ones(x.shape[1:])),out
    def forward(self, x): return self.out(x*self.w)

def weights_after_step(bs, f, data, out=lambda p: p, cbs=None):
    """Return the weights after a step of SGD so large that they show the gradient of the loss `f`

    `bs` is the batch size.
    """
    dls = DataLoaders(DataLoader(TensorDataset(*data), bs=bs), DataLoader(TensorDataset(*data), bs=32))
    learn = Learner(dls, Scale(data[0], out), f, opt_func=SGD, cbs=Float32Loss())
    with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e3, cbs=cbs)
    return weights(learn)

@pytest.mark.parametrize('case', [*right.values(),*wrong.values()], ids=[*right,*(f'not_{o}' for o in wrong)])
def test_a_loss_is_warned_of_if_and_only_if_the_gradient_differs(case):
    f,data,*out = case
    full_batch = weights_after_step(32, *case)
    accumulated = []
    def accumulate(): accumulated.append(weights_after_step(16, *case, cbs=GradientAccumulation(32)))
    warnings_given = count_warnings(accumulate)
    # shows how much rounding matters
    reversed_order = weights_after_step(32, f, [o.flip(0) for o in data], *out)
    def relative_diff(ws): return ((ws-full_batch).abs().max()/full_batch.abs().max()).item()
    limit = 50*max(relative_diff(reversed_order), torch.finfo(full_batch.dtype).eps)
    if case in wrong.values(): assert relative_diff(accumulated[0])>50*limit and warnings_given=={not_a_mean:1}
    else: assert relative_diff(accumulated[0])<limit and not warnings_given

some_padded,padded_late,unpadded = (toy_data(70, True) for _ in range(3))
padded_late.tensors[1][:4].clamp_(min=0)   # no padding in the first micro-batch
unpadded.tensors[1].clamp_(min=0)
# Functions of a Learner that turn the predictions into the output of a model of transformers
def computes_loss(l): l.pred = dict(logits=l.pred, loss=ignoring(l.pred if l.y.ndim>1 else l.pred[:,None], l.y))
def computes_loss_and_hides_targets(l):
    computes_loss(l)
    l.yb = (dict(labels=l.y),)
def names_logits(l): l.pred = dict(logits=l.pred)
def returning(f, loss_func=lambda out,_: out['loss']):
    "Return arguments of a run in which `f(learn)` turns the predictions into a dict"
    return dict(loss_func=loss_func, cbs=lambda: [CallAt('after_pred', f, run_valid=True)])
@pytest.mark.parametrize('micro', [1,4])
@pytest.mark.parametrize('data,kwargs,warning', [
    (padded_late,dict(loss_func=ignoring),not_a_mean), (padded_late,{},None),
    (padded_late,returning(names_logits, lambda out,y: ignoring(out['logits'], y)),not_a_mean),
    (some_padded,returning(computes_loss),not_a_mean),
    (some_padded,returning(computes_loss_and_hides_targets),not_a_mean),
    (some_padded,returning(computes_loss)|dict(acc=dict(n_items=not_ignored)),None),
    (unpadded,returning(computes_loss),None), (toy_data(70),returning(computes_loss),None)])
def test_a_loss_is_tried_on_single_samples_and_in_several_micro_batches(micro, data, kwargs, warning):
    "A loss that the model computes is tried as well; it differs only if samples have unequal numbers of targets"
    warnings_given,a,b = warnings_and_runs(micro=micro, accum_bs=16, tokens=data.tensors[1].ndim>1, data=data, **kwargs)
    assert warnings_given==({warning:1} if warning else {}) and (weights_apart(a, b)>1e-3)==bool(warning)

def test_a_loss_on_single_samples_is_tried_when_two_of_them_in_turn_have_the_same_shape():
    "The first six samples all have different lengths, so that no two of them can be joined"
    class MeanOverLength(Module):
        def __init__(self): self.lin = nn.Linear(1, 1)
        def forward(self, x): return self.lin(x.mean(1, keepdim=True))
    def sum_of_squares(pred, y): return (pred-y).pow(2).sum()
    lengths = [2,3,4,5,6,7]+[8]*10
    data = [(torch.randn(n),torch.randn(1)) for n in lengths]
    dl = DataLoader(data, bs=1)
    learn = Learner(DataLoaders(dl, dl), MeanOverLength(), sum_of_squares, opt_func=SGD)
    def fit():
        with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-3, cbs=GradientAccumulation(16))
    assert count_warnings(fit)=={('LossWarning','loss-not-a-mean'):1}

def test_a_loss_on_single_samples_of_different_lengths_cannot_be_tried():
    ds = toy_data(64, True)
    y = ds.tensors[1].clamp_(min=0)
    # neighbours differ in length, so they cannot be joined to a batch of two
    y[::2,3:] = y[1::2,5:] = -100
    warnings_given,a,b = warnings_and_runs(micro=1, accum_bs=16, tokens=True, data=ds, loss_func=ignoring,
        cbs=lambda: [CallAt('before_batch', trim_padding, run_valid=True)])
    assert warnings_given=={not_tried:1} and weights_apart(a, b)>1e-3

@pytest.mark.parametrize('when,expected', [(lambda l: l.train_iter==1,[]),   # the full-batch run skips this step, too
    (lambda l: l.gradient_accumulation.current_step.micro.i==1,[('AccumulationWarning','micro-batch-left-out')]),
    (lambda l: setattr(l, 'yb', ()),[('','no-targets')])])   # fastai does not train without targets
def test_a_callback_that_cancels_micro_batches_is_warned_of_once(when, expected):
    skip = CallAt('before_batch', lambda l: cancel() if when(l) else None)
    assert count_warnings(lambda: toy(4, n=70).fit(2, .1, cbs=[GradientAccumulation(16),skip]))==Counter(expected)

@pytest.mark.parametrize('nm', untried)
def test_a_loss_that_cannot_be_tried_on_parts_trains_and_is_told_once(nm):
    warnings_given = count_warnings(lambda: weights_after_step(16, untried[nm], plain, cbs=GradientAccumulation(32)))
    assert warnings_given=={not_tried:1}

@pytest.mark.parametrize('dtype', [torch.float16,torch.bfloat16])
def test_rounding_of_half_precision_gives_no_warning(dtype):
    def half(p, y): return F.cross_entropy(p.to(dtype), y)
    for i in range(0, 32, 8):
        data = [o.roll(i, 0) for o in plain]
        assert not count_warnings(lambda: weights_after_step(16, half, data, cbs=GradientAccumulation(32)))

class Centre(Module):
    "A layer that subtracts the mean over the samples"
    def forward(self, x): return x-x.mean(0)

@pytest.mark.parametrize('dtype', [torch.float32,torch.bfloat16])
def test_a_model_that_mixes_samples_is_told_in_any_precision(dtype):
    data = TensorDataset(4*torch.randn(64, 5).to(dtype), torch.randint(3, (64,)))
    loaders = DataLoaders(*(DataLoader(data, bs=4) for _ in range(2)))
    model = nn.Sequential(nn.Linear(5, 8), Centre(), nn.Linear(8, 3)).to(dtype)
    learn = Learner(loaders, model, lambda p, y: F.cross_entropy(p.float(), y))
    def train(): learn.fit(1, 1e-3, cbs=GradientAccumulation(16, verbose=False))
    with learn.no_bar(), learn.no_logging(): assert count_warnings(train)=={('LossWarning','samples-see-each-other'):1}

@pytest.mark.parametrize('where', ['fp16','bf16','device'])
@pytest.mark.parametrize('f,expected', [(F.cross_entropy,{}), (summed,{not_a_mean:1})])
def test_the_loss_is_tried_in_mixed_precision_and_on_a_device(f, expected, where, monkeypatch):
    """A device has a random state of its own, which the trial compares

    Here, the state of the CPU takes its place.
    """
    if where=='device':
        own = SimpleNamespace(get_rng_state=lambda device: torch.get_rng_state(),
            set_rng_state=lambda o, device: torch.set_rng_state(o))
        monkeypatch.setattr(torch, 'get_device_module', lambda o: own)
        monkeypatch.setattr(state, 'devices_of', lambda modules: [torch.device('cpu')])
    cbs = [GradientAccumulation(32), *([] if where=='device' else [CpuMixedPrecision(where)])]
    assert count_warnings(lambda: weights_after_step(16, f, plain, cbs=cbs))==expected

class LossWithMemory(Module):
    "A loss that keeps the random numbers it draws, and a moving average of the predictions"
    def __init__(self):
        self.register_buffer('mean', torch.zeros(3).double())
        self.drawn = []
    def forward(self, p, y):
        self.drawn.append((torch.rand(()).item(),random.random(),np.random.rand()))
        self.mean.mul_(0.9).add_(p.detach().mean(0), alpha=0.1)
        return F.cross_entropy(p*(1+self.mean), y)

def test_trying_a_loss_does_not_change_its_state():
    "The state is compared with that of a fit in steps of one micro-batch, which does not try the loss"
    def run(n):
        set_seed(0)
        learn = toy(4, n=32, loss_func=LossWithMemory())
        learn.fit(2, 0., cbs=GradientAccumulation(n))
        return learn.loss_func.drawn,learn.loss_func.mean
    assert deviation(run(4), run(16))<1e-12

# Warnings, and their remedies

# Arguments of `warnings_and_runs` with a model whose hidden state is reset once an epoch, not once a
# batch
remembers = dict(model=lambda: Remembers(5, 3).double(), splitter=all_params, cbs=resets('before_train'))
split = dict(micro=16, acc=dict(micro_batch_size=4))
# Each case: the warnings, arguments of `warnings_and_runs`, and the arguments that the remedy changes
warned = dict(
    hidden_mean=([not_a_mean], dict(tokens=True, loss_func=Masked()), dict(acc=dict(n_items=not_ignored))),
    sum_for_mean=([not_a_mean], dict(loss_func=summed, fit=fit_small_rate), sums),
    mixed=([not_a_mean], dict(n=64, make=partial(toy_for_mixup, loss=SumForMean), fit=fit_small_rate,
        cbs=lambda: [MixesNeighbours()]), dict(make=toy_for_mixup)),
    batchnorm=([batchnorm], dict(model=with_batchnorm), dict(cbs=lambda: [FreezeBN()])),
    untracked=([batchnorm], dict(model=lambda: layers(nn.BatchNorm1d(6, track_running_stats=False)),
        cbs=lambda: [RecordAt('before_train', lambda l: l.model[1].eval())]), dict(model=with_norms_of_a_sample)),
    both=([not_a_mean,batchnorm], dict(model=with_batchnorm, loss_func=summed, fit=fit_small_rate),
        dict(cbs=lambda: [FreezeBN()], **sums)),
    state=([hidden_state], remembers, dict(cbs=resets('before_batch'))),
    state_where_split=([hidden_state], remembers|split, dict(cbs=list, model=layers)),
    little_state_where_split=([hidden_state],
        remembers|split|dict(model=lambda: RemembersLittle(5, 3).double()), dict(cbs=list, model=layers)))

@pytest.mark.parametrize('nm', warned)
def test_a_warning_is_true_and_its_remedy_works(nm):
    keys,kwargs,remedy = warned[nm]
    warnings_given,a,b = warnings_and_runs(**kwargs)
    assert warnings_given==dict.fromkeys(keys, 1) and weights_apart(a, b)>1e-4
    warnings_given,a,b = warnings_and_runs(**kwargs|remedy)
    assert not warnings_given and assert_same_run(a, b)

@pytest.mark.parametrize('f', [adds,adds_in_place,adds_of_predictions])
def test_a_penalty_on_a_sum_counts_once_a_step(f):
    warnings_given,a,b = warnings_and_runs(cbs=lambda: [RecordAt('after_loss', f)], **sums)
    assert not warnings_given and assert_same_run(a, b)

words = {not_a_mean:('% off', "reduction = 'sum'", "reduction='mean'"),
    hidden_state:('Remembers', '`reset()`', 'bs=16', 'ActivationCheckpoint'),
    batchnorm:('2 BatchNorm layers', '4 samples', '16 samples of a step', 'larger micro-batches', 'recalibrate_bn(16)')}

def learner_with_three_warnings():
    "Return a Learner whose fit warns of its loss, of its hidden state and of BatchNorm"
    def model(): return nn.Sequential(Remembers(5, 3), nn.BatchNorm1d(3), nn.BatchNorm1d(3, affine=False)).double()
    learn = toy(4, n=64, model=model, loss_func=summed, splitter=all_params)
    learn.model.reset = learn.model[0].reset
    return learn

def test_each_warning_comes_once_for_each_learner_and_names_a_remedy():
    acc = GradientAccumulation(16)
    for _ in range(2):
        learn = learner_with_three_warnings()
        with pytest.warns(AccumulationWarning) as collected: learn.fit(2, 1e-5, cbs=acc)
        for (category,_),expected in words.items():
            text, = [str(o.message) for o in collected if o.category.__name__==category]
            places = [text.find(o) for o in expected]
            assert -1 not in places and places==sorted(places)   # the likeliest remedy comes first
            assert text.partition('\nMore: ')[0].count('. ')<=2, 'more than three sentences'

def test_a_second_fit_of_a_learner_says_only_what_is_new():
    "`fine_tune` has two fits; another loss function is tried, and told again"
    learn,acc = learner_with_three_warnings(),GradientAccumulation(16)
    def told(): return set(count_warnings(lambda: learn.fit(1, 1e-5, cbs=acc)))
    assert told()==set(words) and not told()
    learn.loss_func = lambda p,y: summed(p, y)
    assert told()==set(words)
    fine_tuned = learner_with_three_warnings()
    counted = count_warnings(lambda: fine_tuned.fine_tune(1, 1e-5, cbs=acc))
    assert set(counted.values())=={1}

@pytest.mark.parametrize('search', [lambda l: l.accum_check(cbs=GradientAccumulation(16)),
    lambda l: l.accum_find(show_plot=False), lambda l: l.bs_find(show_plot=False)], ids=['check','noise','size'])
def test_a_check_or_a_search_before_a_fit_takes_no_warning_from_the_fit(search):
    "They run fits whose warnings nobody sees"
    body = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6))
    learn = toy(4, n=64, model=lambda: nn.Sequential(body, nn.Linear(6, 3)).double(), splitter=all_params)
    search(learn)
    def fit(): learn.fit(1, 1e-5, cbs=GradientAccumulation(16))
    assert count_warnings(fit)=={('BatchNormWarning','batchnorm'):1} and not count_warnings(fit)

def test_a_remedy_for_batchnorm_is_one_that_the_model_has():
    "Only the body of a model whose first part has BatchNorm can be frozen, and only some models have segments"
    def message(model, cbs=()):
        "Return the warning of a fit, and the remedy of the check"
        learn = toy(4, n=32, model=lambda: model.double(), splitter=all_params)
        check = learn.accum_check(cbs=[GradientAccumulation(16),*cbs])
        with collect_warnings() as seen: learn.fit(1, 1e-5, cbs=[GradientAccumulation(16),*cbs])
        warning = next(str(o.message) for o in seen if '#batchnorm' in str(o.message))
        remedy = next(o.remedy for o in check.rows if o.what=='predictions')
        for o in ('FreezeBN','ActivationCheckpoint','recalibrate_bn'): assert (o in warning)==(o in remedy)
        return warning
    body = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6))
    assert '`fastaccum.FreezeBN(lambda m: m[0])`' in message(nn.Sequential(body, nn.Linear(6, 3)))
    without = message(nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)))
    assert 'FreezeBN' not in without and 'recalibrate_bn(16)' in without
    plain = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    assert 'recalibrate_bn' not in message(plain, [RecalibrateBN()])
    blocks = [nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)) for _ in range(3)]
    assert '`fastaccum.ActivationCheckpoint()`' in message(nn.Sequential(*blocks, nn.Linear(5, 3)))

def test_each_warning_is_ignored_by_its_category_and_all_by_the_base_class():
    kinds = {c.__name__:c for c in AccumulationWarning.__subclasses__()}
    def told_without(*categories):
        "Return the warnings of a fit in which these categories are ignored"
        learn = learner_with_three_warnings()
        def fit():
            for o in categories: warnings.filterwarnings('ignore', category=o)
            learn.fit(1, 1e-5, cbs=GradientAccumulation(16))
        return set(count_warnings(fit))
    assert told_without()==set(words) and not told_without(AccumulationWarning)
    for key in words: assert told_without(kinds[key[0]])==words.keys()-{key}
    learn = learner_with_three_warnings()
    with weights_unchanged(learn), pytest.raises(AccumulationWarning), collect_warnings('error'):
        learn.fit(1, 1e-5, cbs=GradientAccumulation(16))

class UsersModel(nn.Sequential):
    "A model that is defined in this file, the user's file; its `forward` is in the stack of a warning"
    def __init__(self):
        super().__init__(Remembers(5, 3).double())
        self.reset = self[0].reset
    def forward(self, x): return super().forward(x)

def with_limited_memory(): return layers(LimitedMemory(runs_out_above(5, 'forward')))

places = dict(
    first_step=lambda: toy(4, model=with_batchnorm).fit(1, cbs=GradientAccumulation(16)),
    one_cycle=lambda: toy(4, model=with_batchnorm).fit_one_cycle(1, cbs=GradientAccumulation(16)),
    before_fit=lambda: toy(16).fit(1, cbs=GradientAccumulation(8)),
    model=lambda: toy(4, model=UsersModel, splitter=all_params).fit(1, cbs=GradientAccumulation(16)),
    memory=lambda: toy(16, model=with_limited_memory).fit(1, cbs=GradientAccumulation(16, True, 'auto')),
    schedule=lambda: toy(4).fit(1, cbs=GradientAccumulationSchedule(8, 16, finish=5)),
    nothing_to_freeze=lambda: toy(4).fit(2, cbs=FreezeBN()),
    fresh=lambda: toy(4, model=partial(with_batchnorm, 0.)).fit(2, cbs=FreezeBN()))

@pytest.mark.parametrize('nm', places)
def test_a_warning_comes_once_and_shows_the_line_of_the_fit(nm):
    "The line is not in fastaccum, and not in the user's model, whose `forward` is also in the stack"
    with collect_warnings() as collected: places[nm]()
    warning, = [o for o in collected if '.html#' in str(o.message)]
    assert warning.filename==__file__
    assert re.search(r'\.fit\w*\(', linecache.getline(warning.filename, warning.lineno))

@pytest.mark.parametrize('action', ['default','module','once'])
def test_a_warnings_filter_that_shows_repeated_warnings_once_shows_each_of_three_once(action):
    with collect_warnings(action) as collected:
        learner_with_three_warnings().fit(1, 1e-5, cbs=GradientAccumulation(16))
    kinds = Counter(o.category.__name__ for o in collected if issubclass(o.category, AccumulationWarning))
    assert kinds==dict.fromkeys([category for category,_ in words], 1)

# Loaders

class LyingLoader(BatchListLoader):
    """A loader of given batches that claims to have `n` batches of 4 samples

    By default, `n` is the number of batches.
    """
    after_batch,bs = None,4
    def __init__(self, batches, n=None):
        super().__init__(toy_data(64), [batches])
        self.n = n or len(batches)
    def __len__(self): return self.n

fours,twos,sixes = (in_chunks(list(range(64)), n) for n in (4,2,6))
# Each case: the entry of the warning, whether the run is the full-batch run, and arguments of
# `LyingLoader`
loaders = dict(right=('', True, fours), fewer_than_it_says=('fewer-batches', True, fours, 20),
    smaller=('fewer-batches', True, twos),
    empty_batches=('fewer-batches', True, [[], *fours[:6], [], *fours[6:], []]),
    more_than_it_says=('more-batches', False, fours, 10), more_whole_steps=('more-batches', True, fours, 8),
    larger_than_it_says=('larger-batches', False, sixes))

@pytest.mark.parametrize('nm', loaders)
def test_a_loader_with_other_batches_than_it_claims_is_warned_of(nm):
    key,same,*args = loaders[nm]
    a,b = toy(16, n=64),toy(4, n=64)
    b.dls.loaders[0] = LyingLoader(*args)
    fit(a, None)
    assert count_warnings(lambda: fit(b, GradientAccumulation(16)))==({('',key):1} if key else {})
    if same: assert weights_apart(a, b)<1e-9
    else: assert weights_apart(a, b)>1e-4

@pytest.mark.parametrize('key,bs,acc,big', [('larger-than-a-step', 16, GradientAccumulation(8), 16),
    ('schedule-cut-short', 4, GradientAccumulationSchedule(8, 8, finish=5), 8)])
def test_a_size_that_may_be_a_mistake_is_warned_of_and_the_run_is_as_the_warning_says(key, bs, acc, big):
    a,b = toy(big),toy(bs)
    fit(a, None)
    assert count_warnings(lambda: fit(b, acc))=={('',key):1}
    assert weights_apart(a, b)<1e-7 and len(a.recorder.losses)==len(b.recorder.losses)

texts = [torch.randint(2, 9, (12,), generator=gen) for _ in range(64)]

@pytest.mark.parametrize('shuffle', [False,True])
def test_a_sorted_loader_is_warned_of_if_it_shuffles_and_only_then_the_run_differs(shuffle):
    def run(bs, cbs):
        set_seed(0)
        dl = SortedDL([(o,int(o[0])%2) for o in texts], bs=bs, shuffle=shuffle, res=list(range(64)))
        learn = Learner(DataLoaders(dl, dl), nn.Sequential(nn.Embedding(9, 3), nn.Flatten(), nn.Linear(36, 2)).double(),
            CrossEntropy(), opt_func=SGD, cbs=Float32Loss())
        with learn.no_bar(), learn.no_logging(): learn.fit(1, 0.1, cbs=cbs)
        return learn
    full_batch,accumulated = run(16, None),[]
    warnings_given = count_warnings(lambda: accumulated.append(run(4, GradientAccumulation(16))))
    assert warnings_given==({loader_order:1} if shuffle else {})
    assert (weights_apart(full_batch, accumulated[0])>1e-7)==shuffle

# Changing the size

@pytest.mark.parametrize('epochs', [False,True])
@pytest.mark.parametrize('nm', ['accum_bs','n_acc'])
def test_a_new_size_takes_effect_in_the_next_fit_or_epoch(nm, epochs):
    def run(learn, obj, nm):
        "Fit twice; set the attribute `nm` of `obj` to 8 between fits, or if `epochs`, after each epoch"
        learn.fit_one_cycle(2, 0.1, cbs=[RecordAt('after_epoch', lambda l: epochs and setattr(obj, nm, 8))])
        setattr(obj, nm, 8)
        learn.fit(1, 0.1)
        return learn
    acc,big = GradientAccumulation(16),toy(16, n=64)
    assert_same_run(run(big, big.dls.train, 'bs'), run(toy(4, n=64, cbs=acc), acc, nm))
