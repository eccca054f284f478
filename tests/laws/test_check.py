"`accum_check` tells whether a fit is the full-batch run, and if not, where it differs and what to type."
import random, re
from collections import UserDict
from functools import partial
import pytest, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader as TorchDataLoader, IterableDataset
from fastai.text.all import (Callback, CancelFitException, CrossEntropyLossFlat, DataLoader, GradientClip, LMDataLoader,
    MixUp, OptimWrapper, Pipeline, SortedDL, TfmdDL, GradientAccumulation as FastaiGradientAccumulation)
from fastaccum import (ActivationCheckpoint, GradientAccumulation, GradientAccumulationSchedule,
    GradientAccumulationScheduler, GradientCache)
from fastaccum.testing import CrossEntropy, deviation, toy, toy_data, both_runs
from common import CallAt, CpuMixedPrecision, RaiseAt, raise_oom_above, weights, with_float32_inputs
from small_learners import all_params, make_application, with_loaders
from test_warned import ignoring, not_ignored, summed
from test_dry_runs import dry_runs, unchanged

check = dry_runs['accum_check']
row_names = ['loss','predictions','random numbers','callbacks','loader','gradients','model state']

def failed_rows(res): return {o.what for o in res.rows if not o.ok}
def row(res, what): return next(o for o in res.rows if o.what==what)
def net(*layers): return nn.Sequential(nn.Linear(5, 6), *layers, nn.Linear(6, 3))

# Helpers that make Learners, with batches of 12 samples
def learner_of(model, bs=12, **kwargs): return toy(bs, model=model, splitter=all_params, **kwargs)
def with_layers(*layers, **kwargs):
    "Return a Learner with `layers` between two linear layers"
    return learner_of(lambda: net(*layers).double(), **kwargs)
def in_float32(*layers, **kwargs):
    return learner_of(lambda: net(*layers or [nn.Tanh()]), data=with_float32_inputs(toy_data(40)), **kwargs)
def with_mixup(*cbs, **kwargs): return in_float32(cbs=[MixUp(),*cbs], loss_func=CrossEntropyLossFlat(**kwargs))
def on_loader(dl, model=None, **kwargs):
    return with_loaders(learner_of(model, **kwargs) if model else toy(12, **kwargs), dl, dl)

# Fits that are the full-batch run, so the check must not report a difference

class Mapped(nn.Linear):
    "A linear layer that takes a mapping and a tensor, and returns a mapping"
    def forward(self, b, z): return dict(logits=super().forward(b['x'])*z, note='text')
class Unused(nn.Sequential):
    "A model that does not use its first layer"
    def forward(self, x): return self[1](x)
class Stream(IterableDataset):
    def __iter__(self): return iter(data)
    def __len__(self): return 40
def mean_penalty(): return CallAt('after_loss', lambda l: setattr(l, 'loss_grad', l.loss_grad+l.pred.square().mean()))
class ScalesByFit(Callback):
    "Multiplies the loss by a random number, which is drawn once at the beginning of a fit"
    def before_fit(self): self.by = 1+random.random()
    def after_loss(self): self.learn.loss_grad = self.loss_grad*self.by
class ScalesByProgress(Callback):
    def after_loss(self): self.learn.loss_grad = self.loss_grad*(1+self.pct_train)
class GivesInputs(Callback):
    "Sets the inputs as an attribute of the loss function"
    def before_batch(self): self.learn.loss_func.x = self.x
class LossOfInputs(nn.Module):
    def forward(self, p, y): return F.cross_entropy(p+self.x[:,:3], y)

def mappings():
    "Return a Learner whose inputs and predictions are mappings"
    def batch(items):
        x,y = (torch.stack(o) for o in zip(*items))
        return UserDict(x=x),x[:,:3],y
    learn = on_loader(DataLoader(data, bs=12, create_batch=batch), lambda: Mapped(5, 3).double(),
        loss_func=lambda p,y: F.cross_entropy(p['logits'], y))
    learn.dls.n_inp = 2
    return learn
def before_norm():
    "Return a model with a bias that normalization removes, so its gradient is a rounding error"
    conv = nn.Unflatten(1, (1,5)),nn.Conv1d(1, 3, 2),nn.InstanceNorm1d(3),nn.Flatten()
    return nn.Sequential(*conv, nn.Linear(12, 3)).double()

def with_old_gradients():
    "Return a Learner whose parameters have gradients, as if an earlier fit had left them"
    learn = toy(12)
    for p in learn.model.parameters(): p.grad = torch.ones_like(p)
    return learn

def contrastive(p, y): return F.cross_entropy(F.normalize(p)@F.normalize(p.roll(1, 1)).T, torch.arange(len(p)))

data = list(zip(*toy_data(40).tensors))
exact = dict(plain=lambda: toy(12), tokens=lambda: toy(12, tokens=True), batch_of_one=lambda: toy(1),
    shuffled=lambda: toy(12, shuffle=True), mappings=mappings, layer_norm=lambda: with_layers(nn.LayerNorm(6)),
    no_dropout=lambda: with_layers(nn.Dropout(0.)), rounding_of_zero=lambda: learner_of(before_norm),
    frozen_statistics=lambda: with_layers(nn.BatchNorm1d(6), cbs=CallAt('before_batch', lambda l: l.model[1].eval())),
    unused=lambda: learner_of(lambda: Unused(nn.Linear(5, 3), nn.Linear(5, 3)).double()),
    summed=lambda: toy(12, loss_func=CrossEntropy(reduction='sum')), clipped=lambda: toy(12, cbs=GradientClip(1e-3)),
    mean_penalty=lambda: toy(12, cbs=mean_penalty()), left_over=with_old_gradients,
    once_a_fit=lambda: toy(12, cbs=ScalesByFit()),
    kept_by_the_loss=lambda: toy(12, loss_func=LossOfInputs(), cbs=GivesInputs()),
    torchs=lambda: toy(12, opt_func=partial(OptimWrapper, opt=torch.optim.AdamW)),
    fp16=lambda: in_float32(cbs=CpuMixedPrecision()), bf16=lambda: in_float32(cbs=CpuMixedPrecision(amp_mode='bf16')),
    overflows=lambda: in_float32(cbs=CpuMixedPrecision(), loss_func=lambda p,t: 1e4*F.cross_entropy(p, t)),
    relu=lambda: in_float32(nn.Linear(6, 99), nn.ReLU(), nn.Linear(99, 6), nn.ReLU()),
    scheduled=lambda: toy(4, cbs=GradientAccumulationSchedule(8, 16)),
    own_sizes=lambda: toy(12, tokens=True, loss_func=ignoring, cbs=GradientAccumulation(24, n_items=not_ignored)),
    torchs_loader=lambda: on_loader(TorchDataLoader(data, 12, shuffle=True)),
    torchs_stream=lambda: on_loader(TorchDataLoader(Stream(), 12)),
    follows_progress=lambda: toy(12, cbs=ScalesByProgress()),
    follows_at_odd_sizes=lambda: toy(13, cbs=ScalesByProgress()), ragged_end=lambda: toy(12, n=30),
    short=lambda: on_loader(DataLoader(data[:7], bs=12)), stream=lambda: on_loader(DataLoader(Stream(), bs=12, n=40)),
    workers=lambda: on_loader(DataLoader(data, bs=12, num_workers=2)))

def blocks(*layers): return lambda: nn.Sequential(*map(nn.Sequential, layers)).double()
def pairs(cb): return learner_of(blocks(nn.Linear(5, 3)), loss_func=contrastive, cbs=cb)
with_draws = blocks(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(.2), nn.Linear(6, 3))
# Fits in which some code gets the whole batch: with a cache, loss and callbacks; with checkpoints, the
# model as well; if batches are split, callbacks in `before_batch`
acc = GradientAccumulation
cached,split = partial(GradientCache, micro_batch_size=4),partial(acc, 12, micro_batch_size=4)
ways = dict(cache=lambda: pairs(cached()), cache_and_mixup=lambda: with_mixup(cached()),
    checkpoint=lambda: pairs(ActivationCheckpoint(nn.Sequential)),
    checkpoint_draws=lambda: learner_of(with_draws, cbs=ActivationCheckpoint(nn.Sequential)),
    split=lambda: toy(12, cbs=split()), split_after_mixup=lambda: with_mixup(split()),
    split_auto=lambda: toy(12, cbs=acc(12, micro_batch_size='auto')))

@pytest.mark.parametrize('nm', exact|ways)
def test_a_fit_that_is_the_full_batch_run_passes(nm):
    res = check((exact|ways)[nm](), steps=3)
    assert res and res.ok and 'the same run' in repr(res) and [*res.off]==[*row_names,'weights'], res
    # the overflow skips a step, so weights differ
    assert failed_rows(res)==({'weights'} if nm=='overflows' else set()), res

class Queue(Callback):
    "Fails unless 32 is a multiple of the batch size, as a queue of 32 embeddings may"
    def before_batch(self): assert 32%len(self.y)==0, 'a queue of 32'
def memory_for(cap): return CallAt('before_batch', lambda learn: raise_oom_above(cap)(len(learn.y)), run_valid=True)
def fails_unless(*sizes):
    "Return a callback that raises a ZeroDivisionError unless the batch has one of these sizes"
    return CallAt('before_batch', lambda learn: 1/(len(learn.y) in sizes))

@pytest.mark.parametrize('bs,cbs,kwargs,parts', [
    (8, lambda: [acc(32)], {}, [8]*4), (8, lambda: [acc(20)], {}, [8]*3), (8, lambda: [acc(1000)], {}, [8]*8+[6]),
    (8, lambda: [acc(32, micro_batch_size=4)], {}, [4]*8), (8, lambda: [acc(8, micro_batch_size=4)], {}, [4]*2),
    (8, lambda: [GradientAccumulationSchedule(16, 32)], {}, [8]*2),
    (8, lambda: [GradientAccumulationSchedule(16, 32, start=3, finish=1.)], {}, [8]*2),
    (8, lambda: [GradientAccumulationScheduler({0:4})], {}, [8]*4), (8, lambda: [cached()], {}, [4]*2),
    (8, lambda: [acc(32),cached()], {}, [8]*4), (8, lambda: [acc(32)], dict(accum_bs=16), [8]*2),
    (12, lambda: [acc(12)], {}, [6,4,2]), (12, list, {}, [6,4,2]), (12, list, dict(accum_bs=20), [12,8]),
    (6, list, {}, [4,2]), (16, list, {}, [8,5,3]), (8, list, dict(accum_bs=32), [8,8,8,5,3]),
    (30, lambda: [acc(30, micro_batch_size=8)], {}, [8,8,7,7]),
    (16, lambda: [acc(16, micro_batch_size='auto')], {}, [6,5,5]),
    (16, lambda: [Queue(),mean_penalty()], {}, [8,8]), (40, lambda: [acc(70),fails_unless(70, 35)], {}, [35]*2)])
def test_the_check_compares_the_sizes_of_training(bs, cbs, kwargs, parts):
    """If a callback accumulates, the check compares a whole step with the micro-batches of this step

    Without such a callback, or if a step is one micro-batch, the check cuts the batch into parts of
    unequal sizes: with equal sizes, a mean of means would be right by chance. If a callback fails with
    these sizes, it tries other sizes.
    """
    batch_sizes,model_sizes = [],[]
    learn = toy(bs, cbs=CallAt('before_batch', lambda learn: batch_sizes.append(len(learn.y))))
    learn.model[0].register_forward_pre_hook(lambda m, args: model_sizes.append(len(args[0])))
    res = check(learn, cbs=cbs(), **kwargs)
    assert res.ok and not failed_rows(res), res
    assert res.sizes==parts and max(batch_sizes)==sum(parts), res
    n = len(parts)
    assert parts in [model_sizes[i:i+n] for i in range(len(model_sizes))]

@pytest.mark.parametrize('cbs,whole,parts', [(lambda: [acc(32)],8,'5, 3'),
    (lambda: [acc(32, micro_batch_size=4)],4,'2, 2'), (lambda: [acc(8, micro_batch_size='auto')],4,'2, 2'),
    (lambda: [acc(8, micro_batch_size='auto')],2,'1, 1'),
    (lambda: [acc(8, micro_batch_size=4)],4,'2, 2'),
    (lambda: [acc(32),cached()],4,'2, 2')])
def test_if_a_step_does_not_fit_into_memory_fewer_samples_are_compared(cbs, whole, parts):
    "The check compares as many samples as fit, and the title of the table says how many"
    res = check(toy(8, cbs=[memory_for(whole),SumPenalty()]), cbs=cbs())
    n = next(o for o in cbs() if hasattr(o, 'accum_bs')).accum_bs
    assert f'{n} samples do not fit in memory at once, so {whole} were compared' in repr(res), res
    assert f'micro-batches of {parts}: not' in repr(res) and failed_rows(res)=={'callbacks','gradients'}
    with pytest.raises(torch.OutOfMemoryError): check(toy(8, cbs=memory_for(whole)), cbs=cbs(), accum_bs=16)
    with pytest.raises(torch.OutOfMemoryError): check(toy(8, cbs=memory_for(1)), cbs=cbs())

@pytest.mark.parametrize('kwargs', [dict(n_items=lambda learn: 1),dict(n_items=lambda learn: len(learn.y)**2)])
def test_a_wrong_n_items_is_found_even_if_all_parts_are_equal(kwargs):
    """If all parts are equal, any `n_items` gives them equal weights, which are right

    Unequal parts would be wrong.
    """
    res = check(toy(8, n=32, cbs=acc(32, **kwargs)))
    o = row(res, 'loss')
    assert failed_rows(res)=={'loss'} and res.off['loss']>1e-3 and 'unequal sizes' in o.where and o.remedy, res
    assert 'loss' in failed_rows(check(toy(8, n=30, cbs=acc(32, **kwargs))))

@pytest.mark.parametrize('nm,no,yes', [('allow_tf32', False, True), ('fp32_precision', 'ieee', 'tf32')])
def test_tf32_is_off_while_the_check_runs(nm, no, yes):
    "TF32 rounds products on a GPU. After the check it has its former setting"
    # PyTorch before 2.9 has no `fp32_precision`
    if not hasattr(torch.backends.cudnn, nm): nm,no,yes = 'allow_tf32',False,True
    cudnn = torch.backends.cudnn if nm=='allow_tf32' else torch.backends.cudnn.conv
    backends,during = [torch.backends.cuda.matmul,cudnn],[]
    def settings(): return [getattr(o, nm) for o in backends]
    before = settings()
    try:
        for o in backends: setattr(o, nm, yes)
        check(toy(12, cbs=CallAt('before_batch', lambda l: during.append(settings()))))
        assert during and all(o==[no]*2 for o in during) and settings()==[yes]*2
    finally:
        for o,was in zip(backends, before): setattr(o, nm, was)

def test_a_compiled_model_is_checked_without_compiling_it():
    """The check runs batches of many sizes with hooks, and each would be compiled anew

    A fit after the check compiles.
    """
    compiled = []
    def backend(graph, inputs):
        compiled.append(len(inputs))
        return graph
    learn = toy(4, cbs=GradientAccumulation(12), splitter=all_params)
    learn.model = torch.compile(learn.model, backend=backend)
    with unchanged(learn): assert check(learn, steps=2).ok and not compiled
    with learn.no_logging(): learn.fit(1)
    assert compiled

# Fits that differ from the full-batch run, and the causes that the check names

class NoiseAndDropout(nn.Module):
    "A module that draws random numbers itself, and has a dropout layer"
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(.2)
    def forward(self, x): return self.drop(x)+(.1*torch.randn_like(x) if self.training else 0)
class Skip(nn.ModuleDict):
    "A module that draws no random numbers itself, but has a dropout layer"
    def forward(self, x): return x+self['drop'](x)
class Centre(nn.Module):
    "Subtracts the mean over samples, in training and in evaluation"
    def forward(self, x): return x-x.mean(0)
class Carry(nn.Sequential):
    "Adds the mean of its previous outputs to its outputs"
    h = 0.
    def reset(self): self.h = 0.
    def forward(self, x):
        x = super().forward(x)+self.h
        self.h = x.mean(0).detach()
        return x
class SumPenalty(Callback):
    def after_loss(self): self.learn.loss_grad = self.loss_grad+.1*self.pred.square().sum()
class LateSumPenalty(SumPenalty): order = 60   # runs after fastai's Recorder, whose order is 50
class CentresPredictions(Callback):
    def after_pred(self): self.learn.pred = self.pred-self.pred.mean(0)
class Harmless(Callback):
    "Copies the inputs, which changes no result"
    def before_batch(self): self.learn.xb = tuple(o.clone() for o in self.xb)
class WrongOnParts(Callback):
    "Multiplies the loss by 1+`by` if the batch has fewer than 12 samples"
    order = -1
    def __init__(self, by): self.by = by
    def after_loss(self):
        if self.training: self.learn.loss_grad = self.loss_grad*(1+self.by*(len(self.x)<12))

def mean_with_gradient_of_sum(p, y):
    "Return a loss whose value is a mean over samples, and whose gradient is that of a sum"
    l = F.cross_entropy(p, y)
    return l+(len(p)-1)*(l-l.detach())

class Teacher(Callback):
    "Adds to the loss the distance of the predictions from those of another model, which has BatchNorm"
    def __init__(self): self.other = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)).double()
    def after_loss(self): self.learn.loss_grad = self.loss_grad+F.mse_loss(self.pred, self.other(self.x))
class LossWithBatchNorm(nn.Module):
    "A loss that depends on all samples of a batch, through a layer of BatchNorm"
    def __init__(self):
        super().__init__()
        self.judge = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
    def forward(self, p, y): return self.judge(p).square().mean()+F.cross_entropy(p, y)

# Each case: a function that returns a Learner; the rows of the check that fail (besides gradients and
# buffers) and the causes that each names; whether the row `gradients` says that the run would be exact
# without these causes
different = dict(batchnorm=(lambda: with_layers(nn.BatchNorm1d(6)), dict(predictions='BatchNorm1d 1'), True),
    dropouts=(lambda: with_layers(nn.Dropout(.2), nn.Tanh(), nn.Dropout(.2)), {'random numbers':'Dropout 1, 3'}, True),
    skip=(lambda: with_layers(Skip(dict(drop=nn.Dropout(.2)))), {'random numbers':'Dropout 1.drop'}, True),
    both=(lambda: with_layers(NoiseAndDropout()), {'random numbers':'NoiseAndDropout 1; Dropout 1.drop'}, True),
    centre=(lambda: with_layers(Centre()), dict(predictions='Centre 1'), False),
    before_batchnorm=(lambda: with_layers(Centre(), nn.BatchNorm1d(6)),
        dict(predictions='Centre 1; BatchNorm1d 2'), False),
    carry=(lambda: learner_of(lambda: Carry(nn.Linear(5, 3)).double()), dict(predictions=''), False),
    hidden=(lambda: toy(12, tokens=True, loss_func=ignoring), dict(loss=''), False),
    contrastive=(lambda: toy(12, loss_func=contrastive), dict(loss=''), False),
    undeclared=(lambda: toy(12, loss_func=summed), dict(loss=''), False),
    slope=(lambda: toy(12, loss_func=mean_with_gradient_of_sum), {}, False),
    clipped=(lambda: toy(12, cbs=[WrongOnParts(-.5),GradientClip(1e-3)]), dict(callbacks='WrongOnParts'), True),
    small=(lambda: in_float32(nn.ReLU(), cbs=WrongOnParts(5e-3)), dict(callbacks='WrongOnParts'), True),
    tiny_double=(lambda: toy(12, cbs=WrongOnParts(1e-5)), dict(callbacks='WrongOnParts'), True),
    mixup=(lambda: with_mixup(Harmless()), dict(callbacks='MixUp'), True),
    mixup_summed=(lambda: with_mixup(reduction='sum'), dict(callbacks='MixUp'), True),
    penalty=(lambda: toy(12, cbs=[Harmless(),SumPenalty()]), dict(callbacks='SumPenalty'), True),
    late=(lambda: toy(12, cbs=[Harmless(),LateSumPenalty()]), dict(callbacks='LateSumPenalty'), True),
    two=(lambda: toy(12, cbs=[SumPenalty(),Harmless(),CentresPredictions()]),
        dict(callbacks='SumPenalty, CentresPredictions'), True),
    cache=(lambda: with_layers(nn.BatchNorm1d(6), nn.Dropout(.2), cbs=GradientCache(micro_batch_size=4)),
        {'predictions':'BatchNorm1d 1', 'random numbers':'Dropout 2'}, True),
    all=(lambda: with_layers(nn.BatchNorm1d(6), nn.Dropout(), cbs=CentresPredictions()),
        {'predictions':'BatchNorm1d 1', 'random numbers':'Dropout 2', 'callbacks':'CentresPredictions'}, True),
    # the loss is named as a cause only if it differs for the same predictions
    online=(lambda: toy(12, cbs=Teacher()), dict(callbacks='Teacher'), True),
    judged=(lambda: toy(12, loss_func=LossWithBatchNorm()), dict(loss=''), False),
    kept=(lambda: with_layers(nn.BatchNorm1d(6), loss_func=LossOfInputs(), cbs=GivesInputs()),
        dict(predictions='BatchNorm1d 1'), True))

@pytest.mark.parametrize('nm', different)
def test_a_fit_that_differs_fails_in_the_rows_of_its_causes(nm):
    "Each of these rows names the cause and a remedy; the other rows pass"
    make,expected,exact_without = different[nm]
    res = check(make())
    assert not res and not res.ok and {*expected}<=failed_rows(res)<={*expected,'gradients','model state'}, res
    for k,where in expected.items(): assert row(res, k).remedy and row(res, k).where==where, res
    if exact_without and 'gradients' in failed_rows(res): assert 'exact' in row(res, 'gradients').where, res
    smallest_diff = 1e-6 if nm in ('tiny_double','judged') else 1e-3
    assert 'not the same run' in repr(res) and all(res.off[k]>smallest_diff for k in expected)
    assert ('model state' in failed_rows(res))==(nm in ('batchnorm','before_batchnorm','cache','all','kept'))
    assert 'Harmless' not in repr(res)

def test_a_loader_whose_batches_depend_on_the_batch_size_is_named():
    """Examples are loaders that sort by length and those of language models

    With the check's remedy, the run is exact.
    """
    texts = [(torch.randn(2+i*7%30, 5).double(),torch.tensor(i%3)) for i in range(40)]
    def batch(items):
        return nn.utils.rnn.pad_sequence([x for x,_ in items], batch_first=True),torch.stack([y for _,y in items])
    class Mean(nn.Linear):
        def forward(self, x): return super().forward(x.mean(1))
    dl = SortedDL(texts, sort_func=lambda o: len(o[0]), bs=5, shuffle=True, create_batch=batch)
    def learn(dl): return on_loader(dl, lambda: Mean(5, 3).double())
    res = check(learn(dl))
    assert failed_rows(res)=={'loader'} and 0<res.off['loader']<=1 and 'SortedDL' in repr(res)
    assert 'micro_batch_size' in row(res, 'loader').remedy
    # each step is a batch of the loader
    assert check(learn(dl), cbs=GradientCache(micro_batch_size=2)).ok
    assert check(learn(dl.new(bs=20)), cbs=GradientAccumulation(20, micro_batch_size=5)).ok
    dl = LMDataLoader([torch.randint(0, 9, (60,)) for _ in range(4)], bs=4, seq_len=5)
    def model(): return nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 9)).double()
    assert failed_rows(check(on_loader(dl, model)))=={'loader'}

layers = nn.Tanh,lambda: nn.BatchNorm1d(6),Centre

@pytest.mark.parametrize('kwargs', [{},dict(loss_func=summed),dict(tokens=True),dict(tokens=True, loss_func=ignoring),
    *(dict(model=lambda o=o: net(o()).double(), splitter=all_params) for o in layers),
    *(dict(cbs=lambda cb=cb: [cb()]) for cb in (mean_penalty,SumPenalty,CentresPredictions,Harmless))], ids='-'.join)
@pytest.mark.filterwarnings('ignore::fastaccum.AccumulationWarning')
def test_a_fit_agrees_with_the_check(kwargs):
    a,b = both_runs(4, 12, n=48, **kwargs)
    cbs = kwargs.pop('cbs', list)()
    assert check(toy(12, **kwargs), cbs=cbs).ok==(deviation(weights(a), weights(b))<1e-7)

def test_with_the_argument_steps_the_weights_after_that_many_steps_are_compared():
    "This comparison finds callbacks that change weights after a batch"
    class Shrink(Callback):
        n = 0
        def before_batch(self): self.n += 1   # counts micro-batches, or batches of the full-batch run
        def after_batch(self):
            if self.n==4: self.learn.model[0].weight.data.mul_(.9)
    assert failed_rows(check(toy(12, cbs=Shrink()), steps=2))=={'weights'}
    res = check(with_layers(nn.BatchNorm1d(6)), steps=3)
    assert 'weights' in failed_rows(res) and .01<res.off['weights']<2 and '3 steps' in repr(res)

def test_callbacks_of_the_fit_can_be_passed_to_the_check():
    learn = toy(12, tokens=True, loss_func=ignoring)
    before = list(learn.cbs)
    assert not check(learn).ok and check(learn, cbs=GradientAccumulation(24, n_items=not_ignored)).ok
    assert list(learn.cbs)==before and 'callbacks' in failed_rows(check(toy(12), cbs=[SumPenalty()]))

def test_a_language_model_with_a_hidden_state_passes_the_check_if_batches_are_split():
    "A row of a batch continues a row of the previous batch, and both are in the same micro-batch"
    learn = make_application('language_model', loss_func=lambda p,y: F.cross_entropy(p.flatten(0, 1), y.flatten()))
    assert 'keeps something' in row(check(learn), 'predictions').where
    assert check(learn, cbs=GradientAccumulation(8, micro_batch_size=4)).ok
    assert check(learn, cbs=GradientCache(micro_batch_size=4)).ok

# Learners that fail on parts of a batch, and callbacks or losses that keep the whole batch

class OnlyBatchesOf12(nn.Module):
    "A module with a state of 12 rows, which fails with batches of other sizes"
    def __init__(self):
        super().__init__()
        self.register_buffer('h', torch.zeros(12, 6).double())
    def forward(self, x): return x+self.h
class Target:
    "A container of the targets of a batch that cannot be split"
    def __init__(self, y): self.y = y
def boxed(items): return torch.stack([x for x,_ in items]),Target(torch.stack([y for _,y in items]))
class Views(Callback):
    "Makes two views of each sample, so that a batch has twice as many rows"
    order = 1
    def before_batch(self): self.learn.xb = (torch.cat([self.x,1.1*self.x]),)
def loss_of_views(p, y): return contrastive(*p.chunk(2)[:1], y)+F.mse_loss(*p.chunk(2))

@pytest.mark.parametrize('make,who', [(lambda: with_layers(OnlyBatchesOf12()),'OnlyBatchesOf12 fails.*size'),
    (lambda: toy(12, cbs=CallAt('before_batch', lambda l: 1/(len(l.y)//12))),'CallAt.*zero'),
    (lambda: on_loader(DataLoader(data, bs=12, create_batch=boxed), loss_func=lambda p,t: F.cross_entropy(p, t.y)),
        'Target'), (lambda: toy(4, cbs=[acc(12),CallAt('before_batch', lambda l: 1/(len(l.y)<9), run_valid=True)]),
        'CallAt fails on the whole batch.*zero')])
def test_an_error_on_parts_of_a_batch_is_reported_with_its_source(make, who):
    "The check itself raises no error, because a fit on whole batches, or a fit on parts, may still run"
    res = check(make(), steps=1)
    assert not res.ok and res.off['gradients'] is None and re.search(who, row(res, 'gradients').where), res
    assert 'could not be compared' in repr(res)

def test_generator_and_critic_of_a_gan_are_checked():
    "The generator, which trains after five steps of the critic, is checked as well as the critic"
    def wrong(learn):
        "Double the loss of the generator, but only in parts of a batch"
        if learn.gan_trainer.gen_mode and len(learn.x)<8: learn.loss_grad = learn.loss_grad*2
    learn = make_application('wgan')
    assert check(learn).ok and 'callbacks' in failed_rows(check(learn, cbs=CallAt('after_loss', wrong)))

def test_an_error_that_does_not_repeat_is_raised():
    heard = []
    def fail(learn):
        heard.append(len(learn.y))
        # the check runs the whole batch first, then parts
        if len(heard)==3: raise ZeroDivisionError('planted')
    with pytest.raises(ZeroDivisionError): check(toy(12, cbs=CallAt('before_batch', fail)))

@pytest.mark.parametrize('layers', [[nn.Tanh],[lambda: nn.BatchNorm1d(6)]])
def test_a_callback_that_makes_more_rows_than_samples_is_named(layers):
    "The check names the callback and a remedy, and also BatchNorm if the model has it"
    res = check(with_layers(*(o() for o in layers), loss_func=loss_of_views, cbs=[Views(),Harmless()]))
    o = row(res, 'callbacks')
    assert not res.ok and o.where=='Views' and 'GradientCache(micro_batch_size=' in o.remedy
    assert 'AutoSize' not in repr(res)
    assert ('BatchNorm1d 1' in row(res, 'predictions').where)==(layers[0] is not nn.Tanh)

def test_the_check_names_no_remedy_that_would_be_refused():
    "A model without segments cannot use `ActivationCheckpoint`, so the check does not advise it"
    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(5, 3)
        def forward(self, x): return self.lin(x-x.mean(0))
    o = row(check(learner_of(lambda: One().double())), 'predictions')
    assert not o.ok and o.remedy and 'ActivationCheckpoint' not in o.remedy

def test_the_check_says_what_it_has_not_checked():
    "Not checked are callbacks that are passed to `fit` only, and random transforms of batches"
    from fastai.vision.augment import RandTransform
    class Shift(RandTransform):
        def encodes(self, x:torch.Tensor): return x
    learn = on_loader(TfmdDL(data, bs=12, after_batch=Pipeline([Shift()])))
    res = check(learn)
    assert res.ok and 'cbs=' in row(res, 'callbacks').where and 'Shift' in row(res, 'random numbers').where
    assert 'cbs=' not in row(check(learn, cbs=[]), 'callbacks').where

# Output, and errors

def test_the_table_shows_the_differences_and_their_causes(recwarn):
    "The check gives no warnings"
    res = check(with_layers(nn.BatchNorm1d(6), nn.Dropout()))
    text,mark = repr(res),res._repr_markdown_()
    for o in ('predictions','off by','BatchNorm1d 1','Dropout 2','ActivationCheckpoint()','recalibrate_bn()','exact'):
        assert o in text and o in mark, o
    assert '`' not in text and all(len(l)<=100 for l in text.splitlines()) and mark.count('\n| ')==1+len(row_names)
    assert res.off=={o.what:o.off for o in res.rows} and [*res.off]==row_names
    assert '70 samples at once or in 9 micro-batches of up to 8: the same' in repr(check(toy(8, cbs=acc(99))))
    # the parameters that differ most, and the difference that remains without the causes
    assert {*res.layers}=={f'{i}.{o}' for i in (0,1,3) for o in ('weight','bias')}
    tol = row(res, 'gradients').tol
    assert max(res.layers.values())>1e-3 and max(res.remaining.values())<tol and not recwarn.list
    learn = toy(12)
    learn.freeze()
    assert {o[0] for o in check(learn).layers}=={'2','4'}   # no frozen parameters

def test_each_row_that_is_not_checked_says_why():
    "Where each item is a dict, fastai cannot divide a batch into inputs and targets"
    res = check(on_loader(DataLoader([dict(x=x, y=y) for x,y in data], bs=12)))
    assert all(o.where for o in res.rows if o.off is None) and res.off['predictions'] is None

def test_a_loss_that_a_batch_cannot_show_to_be_right_is_not_called_exact_where_gradients_differ():
    "Each sample has two targets, so the loss may be a mean over samples or over targets"
    pairs = [(x,torch.stack([y,y])) for x,y in data]
    def over_targets(p, y): return F.cross_entropy(p.view(-1, 3), y.view(-1))
    learn = on_loader(DataLoader(pairs, bs=12), lambda: nn.Linear(5, 6).double(), loss_func=over_targets)
    learn.model.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    res = check(learn)
    assert res.off['gradients']>1e-3 and row(res, 'loss').state=='not checked'

def test_a_vertical_bar_does_not_divide_a_cell_of_the_table():
    res = check(toy(12, cbs=fails_unless(12, 6)))
    res.rows[0] = res.rows[0]._replace(where='a|b')
    assert r'a\|b' in res._repr_markdown_()

@pytest.mark.parametrize('make,kwargs,exc,match', [*((lambda: toy(12),{nm:v},(ValueError,TypeError),f'`{nm}.*{v!r}')
        for nm,v in [*(('accum_bs',o) for o in (1,0,2.5,True,'8',71)),('steps',-1),('steps',1.5)]),
    (lambda: on_loader(DataLoader([(x,) for x,_ in data], bs=12)),{},RuntimeError,'no step was made.*pairs'),
    (lambda: toy(12, cbs=RaiseAt('before_batch', CancelFitException, 0)),{},RuntimeError,'no step was made'),
    (lambda: on_loader(DataLoader(data[:7], bs=12, drop_last=True)),{},ValueError,'no batch'),
    (lambda: toy(12, cbs=FastaiGradientAccumulation(24)),{},ValueError,"got fastai's"),
    (lambda: toy(12),dict(cbs=FastaiGradientAccumulation(24)),ValueError,"got fastai's"),
    (lambda: toy(12, cbs=[GradientAccumulation(24),GradientAccumulation(36)]),{},ValueError,'2 callbacks accumulate'),
    (lambda: toy(12, cbs=[GradientCache(micro_batch_size=4),GradientCache(micro_batch_size=6)]),{},ValueError,'two'),
    (lambda: toy(12, cbs=[GradientCache(micro_batch_size=4),GradientAccumulation(24, micro_batch_size=6)]),{},
        ValueError,'whole')], ids=lambda o: o if isinstance(o, str) else '')
def test_what_cannot_be_checked_is_refused(make, kwargs, exc, match):
    learn = make()
    with unchanged(learn), pytest.raises(exc, match=match): check(learn, **kwargs)
