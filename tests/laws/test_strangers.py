"""Unusual callbacks, losses, models and loaders give the full-batch run, or the fit warns or refuses."""
import pytest, torch
from itertools import accumulate, pairwise
from torch import nn
from torch.nn import functional as F
from fastai.callback.core import (Callback, CancelBackwardException, CancelBatchException, CancelEpochException,
    CancelFitException, CancelTrainException)
from fastai.data.core import DataLoaders
from fastai.callback.fp16 import ModelToHalf
from fastai.torch_core import TensorBase
from fastaccum import ActivationCheckpoint, GradientAccumulation, GradientCache
from fastaccum.testing import CrossEntropy, assert_same_run, both_runs, deviation, toy, toy_data
from common import (BatchListLoader, CallAt, RecordAt, collect_warnings, in_chunks, raise_oom_above, weights,
    weights_unchanged)
from small_learners import all_params
from test_refused import HalfGradients

def entries_and_runs(**kwargs):
    "Return the entries of the page Messages to which warnings of `both_runs` link, and its two Learners"
    with collect_warnings() as collected: a,b = both_runs(**dict(n=64)|kwargs)
    links = [str(o.message).partition('messages.html#')[2] for o in collected]
    return [o for o in links if o],a,b

def differ(a, b): return deviation(weights(a), weights(b))>1e-4

# A callback changes the loss. fastaccum tries such a callback: it compares the change of the loss of a
# micro-batch with the changes for parts of the micro-batch

class ChangesLoss(Callback):
    "Adds `f(self)` to the loss; notes batch sizes in `seen`, and the number of calls in `count`"
    def __init__(self, f, event='after_loss'):
        self.f,self.seen,self.count = f,[],torch.zeros(1)
        setattr(self, event, self.change)
    def after_pred(self): self.features = self.pred*2
    def change(self):
        if not self.training: return
        self.seen.append(len(self.x))
        self.count += 1
        self.learn.loss_grad = self.learn.loss_grad+self.f(self)

def norm_of_mean(cb): return cb.pred.mean(0).pow(2).sum()
def spread_of_features(cb): return cb.features.std(0).sum()
def norm_of_a_second_pass(cb): return cb.learn.model(cb.x*2).mean(0).pow(2).sum()
def sum_of_squares(cb): return cb.pred.pow(2).sum()/10
@pytest.mark.parametrize('event', ['after_loss','before_backward'])
@pytest.mark.parametrize('f', [norm_of_mean,spread_of_features,norm_of_a_second_pass,sum_of_squares])
def test_a_callback_that_adds_no_mean_over_samples_is_warned_of_once(f, event):
    entries,a,b = entries_and_runs(cbs=lambda: [ChangesLoss(f, event)])
    assert entries==['changed-loss'] and differ(a, b)

def penalty_on_weights(cb): return sum(p.pow(2).sum() for p in cb.learn.model.parameters())
def mean_of_squares(cb): return cb.pred.pow(2).mean()
def mean_of_features(cb): return cb.features.abs().mean()
def scaled(cb): return cb.learn.loss_grad*2
@pytest.mark.parametrize('f', [penalty_on_weights,mean_of_squares,mean_of_features,scaled])
def test_a_callback_that_adds_a_mean_over_samples_is_right_and_gives_no_warning(f):
    entries,a,b = entries_and_runs(cbs=lambda: [ChangesLoss(f)])
    assert not entries and assert_same_run(a, b)

class AddsInPlace(Callback):
    """Adds a penalty on the weights to the loss in place

    The loss is a view, as the losses of fastai's tensors are.
    """
    def after_loss(self):
        if not self.training: return
        self.learn.loss_grad = self.learn.loss_grad.view_as(self.loss_grad)
        self.learn.loss_grad += 0.1*self.model[0].weight.abs().sum()

class ReturnsTensorBase(CrossEntropy):
    "Returns a tensor of fastai"
    def forward(self, p, y): return TensorBase(super().forward(p, y))

def test_a_penalty_on_weights_that_is_added_in_place_gives_no_warning():
    entries,a,b = entries_and_runs(loss_func=ReturnsTensorBase(), cbs=lambda: [AddsInPlace()])
    assert not entries and assert_same_run(a, b)

def test_trying_a_callback_on_parts_does_not_change_its_attributes():
    cbs = []
    def make():
        cbs.append(ChangesLoss(mean_of_squares))
        return cbs[-1:]
    entries_and_runs(cbs=make, micro=4, n=64)
    assert cbs[1].seen==[4]*32 and cbs[1].count==32 and len(cbs[1].features)==32

def noisy(cb): return (cb.pred*torch.rand_like(cb.pred)).mean()
class GradPenalty(Callback):
    "Adds to the loss the norm of the gradient with respect to the inputs"
    def before_batch(self): self.learn.xb = (self.x.clone().requires_grad_(),)
    def after_loss(self):
        if not self.training: return
        g, = torch.autograd.grad(self.pred.sum(), self.x, create_graph=True)
        self.learn.loss_grad += g.norm()
@pytest.mark.parametrize('cbs,expected', [(lambda: [ChangesLoss(noisy)],'loss-not-tried'),
    (lambda: [GradPenalty()],'changed-loss')])
def test_a_change_of_the_loss_is_tried_with_gradients_but_not_with_random_numbers(cbs, expected):
    "One callback draws random numbers, the other needs the gradient of the inputs, and is no mean over samples"
    entries,_,_ = entries_and_runs(cbs=cbs)
    assert entries==[expected]

def test_a_callback_that_turns_losses_of_samples_into_one_loss_is_tried():
    def mean(learn): learn.loss_grad = learn.loss_grad.mean()
    def largest(learn): learn.loss_grad = learn.loss_grad.topk(2).values.mean()
    for f,expected in ((mean,[]), (largest,['changed-loss'])):
        entries,a,b = entries_and_runs(loss_func=nn.CrossEntropyLoss(reduction='none'),
            fit=lambda learn, cbs: learn.fit(1, .1, cbs=cbs), cbs=lambda: [RecordAt('after_loss', f)])
        assert entries==expected and differ(a, b)==bool(expected)

class TrainsAHead(Callback):
    "Adds a penalty to the loss, and has a head of its own, for which it runs a backward pass"
    def __init__(self): self.head = nn.Linear(3, 1).double()
    def after_loss(self):
        if not self.training: return
        self.learn.loss_grad = self.loss_grad+self.pred.pow(2).mean()
        self.head(self.pred.detach()).pow(2).mean().backward()
def test_a_backward_pass_of_a_callback_that_changes_the_loss_runs_once():
    def grads_of_head(acc):
        torch.manual_seed(0)
        cb = TrainsAHead()
        with collect_warnings(): toy(4, n=64).fit(1, 0., cbs=[acc,cb] if acc else [cb])
        return cb.head.weight.grad
    assert deviation(grads_of_head(GradientAccumulation(16)), grads_of_head(None))<1e-12

def test_a_loss_with_which_a_callback_replaces_the_learners_loss_is_tried():
    def of_batch(learn): learn.loss_grad = F.mse_loss(learn.pred.mean(0), F.one_hot(learn.y, 3).double().mean(0))
    def of_samples(learn): learn.loss_grad = F.mse_loss(learn.pred, F.one_hot(learn.y, 3).double())
    entries,a,b = entries_and_runs(cbs=lambda: [RecordAt('after_loss', of_batch)])
    assert entries==['changed-loss'] and differ(a, b)
    entries,a,b = entries_and_runs(cbs=lambda: [RecordAt('after_loss', of_samples)])
    assert not entries and assert_same_run(a, b)

# Callbacks that read `iter`, or end an epoch early

class ComputesLoss(nn.Module):
    "A model that takes labels, and returns logits and a loss: the mean over labels that are not -100"
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(5, 3).double()
    def forward(self, x, y):
        logits = self.lin(x)
        return dict(loss=F.cross_entropy(logits.flatten(0, -2), y.flatten()), logits=logits)

class PassesOnLoss(Callback):
    "Trains with the loss that the model has computed"
    def before_batch(self): self.learn.xb = (*self.xb,*self.yb)
    def after_pred(self): self.model_loss,self.learn.pred = self.pred['loss'],self.pred['logits']
    def after_loss(self): self.learn.loss_grad = self.model_loss

@pytest.mark.parametrize('has_padding', [False,True])
def test_a_callback_that_passes_on_the_models_loss_is_warned_of_only_if_labels_are_uneven(has_padding):
    data = toy_data(64, tokens=True)
    if not has_padding: data.tensors[1].clamp_(min=0)
    entries,a,b = entries_and_runs(data=data, model=ComputesLoss, splitter=all_params, loss_func=CrossEntropy(),
        cbs=lambda: [PassesOnLoss()], fit=lambda l,cbs: l.fit(2, 1e-3, cbs=cbs))
    assert entries==(['loss-not-tried'] if has_padding and differ(a, b) else [])

def test_iter_and_n_iter_count_steps_in_every_event():
    events = 'before_batch','after_pred','after_loss','before_backward','after_backward','before_step','after_step'
    for bs,acc,n,n_steps in ((4,dict(),70,5), (4,dict(drop_last=True),70,4), (4,dict(micro_batch_size=2),64,4),
            (5,dict(micro_batch_size=3),70,5)):   # a step of 16 ends within a batch of 5
        cbs = [RecordAt(event, lambda learn: (learn.epoch,learn.iter,learn.n_iter)) for event in events]
        toy(bs, n=n).fit(2, cbs=[GradientAccumulation(16, **acc),*cbs])
        expected = [(epoch,i,n_steps) for epoch in range(2) for i in range(n_steps)]
        for o in cbs: assert [*dict.fromkeys(o.values)]==expected

def test_the_current_step_says_which_micro_batch_runs_and_where_it_starts():
    def place(learn):
        micro = learn.gradient_accumulation.current_step.micro
        return micro.i,micro.n_before,micro.n
    for bs,acc,sizes in ((4,{},[4]*4), (8,dict(micro_batch_size=3),[3,3,2]*2)):
        cb = RecordAt('after_pred', place)
        toy(bs, n=16).fit(1, cbs=[GradientAccumulation(16, **acc),cb])
        assert cb.values==[(i,sum(sizes[:i]),n) for i,n in enumerate(sizes)]

def stops_at(event, exc, when):
    "Return a callback that raises `exc` at `event` in training when `when(learn)` is true"
    def stop(learn):
        if learn.training and when(learn): raise exc
    return CallAt(event, stop)
@pytest.mark.parametrize('exc', [CancelTrainException,CancelEpochException,CancelFitException])
@pytest.mark.parametrize('event,i', [('before_batch',2), ('before_batch',0), ('after_batch',1)])
def test_a_callback_that_ends_an_epoch_by_iter_ends_it_as_in_the_full_batch_run(event, i, exc):
    with collect_warnings() as collected:
        a,b = both_runs(n=64, cbs=lambda: [stops_at(event, exc, lambda l: l.iter==i)],
            fit=lambda l,cbs: l.fit(2, .1, cbs=cbs))
    assert not collected and deviation(weights(a), weights(b))<1e-9 and a.train_iter==b.train_iter

# Micro-batches and backward passes that callbacks cancel

class OwnBackward(Callback):
    "Cancels the backward pass of the fit, and calls `f(learn)`, which runs a backward pass itself"
    def __init__(self, f, order): self.f,self.order = f,order
    def before_backward(self): raise CancelBackwardException
    def after_cancel_backward(self): self.f(self.learn)
def of_scaled_loss(learn): (learn.loss_grad*.5).backward()
def of_loss_grad(learn): learn.loss_grad.backward()
def in_halves(learn):
    "Run a backward pass for the second layer, and then one for the others"
    learn.loss_grad.backward(inputs=list(learn.model[2].parameters()), retain_graph=True)
    learn.loss_grad.backward(inputs=[*learn.model[0].parameters(),*learn.model[4].parameters()])

@pytest.mark.parametrize('order', [-5,20])
@pytest.mark.parametrize('f,kwargs', [(of_loss_grad,{}), (of_scaled_loss,{}), (in_halves,{}),
    (of_loss_grad,dict(tokens=True)),
    (of_loss_grad,dict(loss_func=CrossEntropy(reduction='sum'), fit=lambda learn, cbs: learn.fit(2, 1e-3, cbs=cbs))),
    (of_loss_grad,dict(acc=dict(micro_batch_size=2)))])
def test_a_callback_with_its_own_backward_pass_is_counted(f, kwargs, order):
    entries,a,b = entries_and_runs(n=70, cbs=lambda: [OwnBackward(f, order)], **kwargs)
    assert not entries and assert_same_run(a, b)

def set_gradients(learn):
    for p in learn.model.parameters(): p.grad = torch.ones_like(p)
def of_loss(learn): learn.loss.backward()
@pytest.mark.parametrize('f', [set_gradients,of_loss])
def test_gradients_that_do_not_come_from_the_loss_are_refused(f):
    learn = toy(4, n=64)
    before = weights(learn)
    with pytest.raises(RuntimeError, match='loss_grad'): learn.fit(1, cbs=[GradientAccumulation(16),OwnBackward(f, 1)])
    assert weights(learn).equal(before)

@pytest.mark.parametrize('event,exc', [('before_batch',CancelBatchException), ('after_loss',CancelBatchException),
    ('before_backward',CancelBackwardException)])
def test_a_cancelled_micro_batch_is_warned_of_once_if_steps_have_several(event, exc):
    def is_second(learn): return learn.gradient_accumulation.current_step.micro.i==1
    def entries_of(bs):
        with collect_warnings() as collected:
            toy(bs, n=64).fit(2, cbs=[GradientAccumulation(16),stops_at(event, exc, is_second)])
        return [str(o.message).partition('messages.html#')[2] for o in collected]
    assert entries_of(4)==['micro-batch-left-out'] and not entries_of(16)

# Losses without a graph

def loss_of_positives(p, y):
    "Return the mean over samples of a loss that is 0 but for class 0; without class 0, it has no graph"
    is_positive = y==0
    if not is_positive.any(): return torch.zeros((), dtype=p.dtype)
    return F.cross_entropy(p, y, reduction='none')[is_positive].sum()/len(y)

@pytest.mark.parametrize('without', [[0],[1],[3],[0,1,2],[1,2,3],[0,1,2,3]], ids=str)
def test_micro_batches_whose_loss_has_no_graph_count_with_a_gradient_of_zero(without):
    """The micro-batches `without` of each step have a loss without a graph

    If all micro-batches of a step have such a loss, the fit fails with PyTorch's error.
    """
    data = toy_data(64)
    for i in range(64): data.tensors[1][i] = 1 if i//4%4 in without else i%2
    def runs(): return entries_and_runs(data=data, loss_func=loss_of_positives)
    if len(without)<4: assert_same_run(*runs()[1:])
    else:
        with pytest.raises(RuntimeError, match='does not require grad'): runs()

def test_a_model_without_a_parameter_to_train_gives_pytorchs_error():
    acc,splitting = GradientAccumulation(16),GradientAccumulation(16, micro_batch_size=4)
    for bs,cbs in ((16,[]), (4,[acc]), (16,[splitting])):
        learn = toy(bs, n=64)
        learn.model.requires_grad_(False)
        with pytest.raises(RuntimeError, match='does not require grad'): learn.fit(1, cbs=cbs)

# Mixed precision that adds up gradients in half precision

def test_gradients_in_half_precision_are_refused_before_the_model_is_cast():
    learn = toy(4, n=64, cbs=[ModelToHalf(),HalfGradients()])
    cbs = list(learn.cbs)
    with weights_unchanged(learn), pytest.raises(ValueError, match='to_fp16'):
        learn.fit(1, cbs=GradientAccumulation(16))
    assert learn.cbs==cbs and {p.dtype for p in learn.model.parameters()}=={torch.float64}
    learn.remove_cbs([ModelToHalf,HalfGradients])
    learn.fit(1, cbs=GradientAccumulation(16))
    assert len(learn.recorder.losses)==4

# Predictions whose first dimension is not that of samples

class Returns(nn.Module):
    "A linear layer that returns `f(predictions, scale)`; `scale` is a parameter with one number"
    def __init__(self, f):
        super().__init__()
        self.layer,self.scale,self.f = nn.Linear(5, 3),nn.Parameter(torch.ones(())),f
    def forward(self, x): return self.f(self.layer(x), self.scale)

def entries_of_loss(f, loss):
    """Train the model `Returns(f)` with `loss`

    Return the entries of the page Messages to which its warnings link, and whether the weights differ
    from those of the full-batch run.
    """
    model = lambda: Returns(f).double()
    def fit(learn, cbs): learn.fit(1, 0.01, cbs=cbs)
    entries,a,b = entries_and_runs(model=model, loss_func=loss, splitter=all_params, fit=fit)
    return entries,differ(a, b)

def with_number(pred, scale): return pred,7,'words'
def with_scale(pred, scale): return dict(pred=pred, scale=scale.exp())
def after_time(pred, scale):
    "Return predictions whose first dimension is time, and whose second dimension is that of samples"
    return torch.stack([pred,pred*2,pred*3])
def after_classes(pred, scale): return pred.T
# by `f` of the model: a function that takes the output and returns the predictions of samples
predictions_in = {with_number:lambda out: out[0], with_scale:lambda out: out['pred']*out['scale'],
    after_time:lambda out: out.mean(0), after_classes:lambda out: out.T}
@pytest.mark.parametrize('f', predictions_in)
def test_a_loss_is_tried_on_predictions_with_numbers_or_with_time_or_classes_first(f):
    def right(out, y): return F.cross_entropy(predictions_in[f](out), y)
    def compares(out, y): return right(out, y)+predictions_in[f](out).mean(0).pow(2).sum()
    def adds_up(out, y): return right(out, y)*len(y)
    assert entries_of_loss(f, right)==([],False)
    for loss in (compares,adds_up): assert entries_of_loss(f, loss)==(['loss-not-a-mean'],True)

def flat_pairs(pred, scale): return torch.stack([pred,pred], 1).reshape(2, -1)
def counted(pred, scale): return pred,len(pred)
@pytest.mark.parametrize('f,loss', [(flat_pairs,lambda out, y: F.cross_entropy(out.reshape(len(y), 2, 3).mean(1), y)),
    (counted,lambda out, y: F.cross_entropy(out[0], y, reduction='sum')/out[1])])
def test_a_loss_of_outputs_without_a_row_for_each_sample_is_tried(f, loss):
    assert entries_of_loss(f, loss)==([],False)

# Callbacks that add rows to a split batch, or run out of memory

def add_unlabeled(learn):
    """Double the rows of the batch

    The loss ignores the targets of the new rows, as FixMatch does with unlabeled samples.
    """
    if not learn.training: return
    unlabeled = torch.full_like(learn.y, -100)
    learn.xb,learn.yb = (torch.cat([learn.x,learn.x*.9]),),(torch.cat([learn.y,unlabeled]),)
def twice(learn): learn.xb,learn.yb = (learn.x.repeat(2, 1),),(learn.y.repeat(2),)
@pytest.mark.parametrize('f', [add_unlabeled,twice])
def test_rows_that_a_callback_adds_to_a_split_batch_are_warned_of(f):
    def entries_of(bs, **kwargs):
        with collect_warnings() as collected:
            toy(bs, n=64).fit(1, cbs=[GradientAccumulation(16, **kwargs),RecordAt('before_batch', f)])
        return [str(o.message).partition('messages.html#')[2] for o in collected]
    assert entries_of(16, micro_batch_size=4)==['rows-of-a-split-batch']
    assert 'rows-of-a-split-batch' not in entries_of(4)

def test_a_callback_that_leaves_samples_out_of_a_split_batch_is_right_and_gives_no_warning():
    def keep_hardest(learn):
        if not learn.training: return
        hardest = learn.x.norm(dim=1).argsort()[-6:]
        learn.xb,learn.yb = (learn.x[hardest],),(learn.y[hardest],)
    with collect_warnings() as collected:
        a,b = both_runs(n=64, micro=16, acc=dict(micro_batch_size=4),
            cbs=lambda: [RecordAt('before_batch', keep_hardest)])
    assert not collected and assert_same_run(a, b)

def mean_square(p, y): return (p.sum(1)-y).pow(2).mean()
def leave_out_negatives(learn):
    keep = learn.x[:,0]>0
    learn.xb,learn.yb = (learn.x[keep],),(learn.y[keep],)
def test_a_callback_that_leaves_samples_out_gives_the_mean_over_the_samples_that_are_left():
    "The callback leaves 2 to 4 samples in each micro-batch"
    data = toy_data(64)
    for i in (0,1): data.tensors[0][i::4,0].abs_()
    entries,a,b = entries_and_runs(data=data, loss_func=mean_square,
        fit=lambda learn, cbs: learn.fit(2, .01, cbs=cbs),
        cbs=lambda: [RecordAt('before_batch', leave_out_negatives)])
    assert not entries and assert_same_run(a, b)

def test_empty_targets_of_a_loss_that_needs_none_count_as_the_samples_of_the_batch():
    def drop_targets(learn): learn.yb = (torch.zeros(0),)
    entries,a,b = entries_and_runs(n=70, loss_func=lambda p, y: p.pow(2).mean(),
        cbs=lambda: [RecordAt('before_batch', drop_targets)])
    # without targets, fastaccum cannot divide the batch to try the loss on its parts
    assert entries==['loss-not-tried'] and assert_same_run(a, b)

def test_memory_that_runs_out_in_a_callbacks_second_pass_is_an_error_with_the_remedy():
    second_pass = CallAt('before_step', lambda learn: raise_oom_above(4)(8))
    words = "planted(?s:.*)callback's `before_step`, which does not run in micro-batches"
    with pytest.raises(torch.OutOfMemoryError, match=words):
        toy(8, n=32).fit(1, cbs=[GradientAccumulation(16, micro_batch_size='auto'),second_pass])

# Batches whose inputs have other rows than samples, and loaders without a batch size

class GraphLoader(BatchListLoader):
    "A loader of graphs of 3 to 6 nodes: inputs have a row for each node, targets one for each graph"
    bs = 4
    def __iter__(self):
        for idxs in self.cycle():
            x,y = self.dataset[idxs]
            n_nodes = torch.tensor(idxs)%4+3
            yield x.repeat_interleave(n_nodes, 0),torch.arange(len(idxs)).repeat_interleave(n_nodes),y
class OfGraphs(nn.Module):
    "A linear layer for nodes, whose outputs are averaged over each graph"
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)
    def forward(self, x, graph):
        out = self.layer(x)
        total = torch.zeros(int(graph.max())+1, 3, dtype=x.dtype).index_add(0, graph, out)
        return total/graph.bincount()[:,None]
@pytest.mark.parametrize('n,sizes', [(64,[4]*16), (58,[4]*14+[2]), (56,[4,3]*8)], ids=['equal','last','unequal'])
def test_batches_of_graphs_are_counted_by_their_targets(n, sizes):
    "A step of 14 samples is two batches of 4 and two of 3"
    accum_bs = 14 if 3 in sizes else 16
    ends = [*accumulate(sizes, initial=0)]
    micro_batches = [list(range(*o)) for o in pairwise(ends)]
    def run(batches, bs, cbs):
        ds = toy_data(n)
        learn = toy(4, data=ds, model=lambda: OfGraphs().double(), splitter=all_params)
        loader = GraphLoader(ds, [batches])
        loader.bs = bs
        learn.dls = DataLoaders(loader, loader)
        learn.dls.n_inp = 2
        with collect_warnings() as collected: learn.fit(2, .1, cbs=cbs)
        return learn,[str(o.message) for o in collected if '\nMore: ' in str(o.message)]
    a,_ = run(in_chunks(list(range(n)), accum_bs), accum_bs, [])
    b,messages = run(micro_batches, 4, [GradientAccumulation(accum_bs)])
    assert not messages and assert_same_run(a, b)

class Opaque:
    "A batch whose number of samples cannot be seen from outside"
    def __init__(self, o): self.o = o
class OpaqueLoader(BatchListLoader):
    def __init__(self, dataset, bs):
        super().__init__(dataset, [in_chunks(list(range(len(dataset))), bs)])
        self.bs = bs
    def __iter__(self): return ((Opaque(x),Opaque(y)) for x,y in super().__iter__())
class OfOpaque(nn.Linear):
    def forward(self, x): return super().forward(x.o)
@pytest.mark.parametrize('n', [64,58,51])
def test_batches_that_do_not_show_their_size_are_counted_by_the_length_of_the_dataset(n):
    "The last batch of an epoch may have fewer samples than the others"
    def run(bs, *cbs):
        learn = toy(4, model=lambda: OfOpaque(5, 3).double(), splitter=all_params,
            loss_func=lambda p, y: F.cross_entropy(p, y.o))
        learn.dls = DataLoaders(*(OpaqueLoader(toy_data(n), o) for o in (bs,32)))
        # the loss of a part cannot be tried, because a batch of an unknown type cannot be split
        with collect_warnings(): learn.fit(2, .1, cbs=cbs)
        return learn
    assert_same_run(run(16), run(4, GradientAccumulation(16)))

def test_with_auto_a_loader_without_a_batch_size_is_refused_with_a_remedy():
    learn = toy(4, n=64)
    loader = BatchListLoader(toy_data(64), [in_chunks(list(range(64)), 4)])
    learn.dls = DataLoaders(loader, loader)
    with pytest.raises(ValueError, match='learn.dls.train.bs = 16'):
        learn.fit(1, cbs=GradientAccumulation(16, micro_batch_size='auto'))
    loader.bs = 4
    learn.fit(1, cbs=GradientAccumulation(16, micro_batch_size='auto'))
    assert len(learn.recorder.losses)==4

# `accum_check` with such callbacks and models

class Reshapes(Callback):
    """Adds a dimension to the inputs, which the model needs

    With `twice=True`, also makes two views of each sample.
    """
    def __init__(self, twice): self.twice = twice
    def before_batch(self):
        x = torch.stack([self.x,self.x+.1], 1).flatten(0, 1) if self.twice else self.x
        self.learn.xb = (x[:,None],)
class ReshapesAndCompares(Reshapes):
    def after_loss(self): self.learn.loss_grad = self.learn.loss_grad+norm_of_mean(self)
class NeedsShape(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)
    def forward(self, x):
        if x.ndim!=3: raise ValueError('no middle dimension')
        return self.layer(x[:,0])
def pairs(p, y): return F.cross_entropy(p[::2]@p[1::2].T, torch.arange(len(p)//2))

def checked(cb=None, **kwargs):
    "Return the rows of `accum_check` by name"
    learn = toy(4, splitter=all_params, cbs=cb, **kwargs)
    return {o.what:o for o in learn.accum_check(16).rows}
def test_a_callback_that_the_model_needs_is_reported_as_not_checked():
    model = lambda: NeedsShape().double()
    assert checked(Reshapes(False), model=model)['callbacks'].ok
    row = checked(ReshapesAndCompares(False), model=model)['callbacks']
    assert row.state=='not checked' and 'fails without ReshapesAndCompares' in row.where
def test_a_callback_that_the_model_needs_is_named_if_it_makes_more_rows():
    row = checked(Reshapes(True), model=lambda: NeedsShape().double(), loss_func=pairs)['callbacks']
    assert row.off>1e-4 and row.where=='Reshapes'

class Trims(nn.Module):
    "A model that cuts a batch of sequences to the longest sequence, as many models of texts do"
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)
    def forward(self, x): return self.layer(x[:,:int((x!=0).any(2).sum(1).max())])
class TrimmedLoss(CrossEntropy):
    "Cross-entropy that cuts the targets to the length of the predictions"
    def forward(self, p, y): return super().forward(p, y[:,:p.shape[1]])
def test_a_model_that_trims_its_batch_passes_the_check():
    ds = toy_data(64, True)
    x,y = ds.tensors
    lengths = torch.arange(64)%5+2
    is_padding = torch.arange(6)[None]>=lengths[:,None]
    ds.tensors = x.masked_fill(is_padding[...,None], 0),y.masked_fill(is_padding, -100)
    rows = checked(data=ds, model=lambda: Trims().double(), loss_func=TrimmedLoss())
    assert rows['gradients'].ok and rows['predictions'].ok

# `GradientCache` with activations that the model keeps

class Keeps(nn.Module):
    "A model that keeps the outputs of its first layer in an attribute"
    def __init__(self):
        super().__init__()
        self.first,self.second = nn.Sequential(nn.Linear(5, 4), nn.Tanh()),nn.Linear(4, 3)
    def forward(self, x):
        self.kept = self.first(x)
        return self.second(self.kept)
def penalty_on_kept(cb): return cb.learn.model.kept.pow(2).mean()
@pytest.mark.parametrize('more', [[],[GradientAccumulation(16)]], ids=['alone','accumulating'])
def test_the_cache_refuses_a_loss_of_activations_that_the_model_keeps_and_names_what_works(more):
    def train(f, *cbs):
        "Add `f` to the loss; return the weights after a fit, or None if the fit is refused"
        learn = toy(16, n=64, model=lambda: Keeps().double(), splitter=all_params)
        before = weights(learn)
        try: learn.fit(1, 0.1, cbs=[ChangesLoss(f),*cbs])
        except RuntimeError as e:
            assert 'ActivationCheckpoint()' in str(e) and weights(learn).equal(before)
            return None
        return weights(learn)
    cache = GradientCache(micro_batch_size=4)
    assert train(penalty_on_kept, cache, *more) is None
    assert train(penalty_on_weights, cache, *more) is not None
    assert deviation(train(penalty_on_kept), train(penalty_on_kept, ActivationCheckpoint(nn.Sequential), *more))<1e-12
