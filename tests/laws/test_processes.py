"""A run in several processes is that of one process, and gradients are exchanged once a step.

Processes may have different numbers of samples, micro-batches of different sizes, and less memory.
"""
import math, pytest, torch
from collections import Counter
from copy import deepcopy
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from itertools import count, product
from random import Random
from torch import distributed as dist, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from fastai.vision.all import (Adam, AvgLoss, Callback, CancelBackwardException, CancelBatchException,
    CancelFitException, DataLoader, GradientClip, Module, OptimWrapper, SGD, SaveModelCallback, ShortEpochCallback,
    accuracy, noop)
from fastaccum import (ActivationCheckpoint, GradientAccumulation, GradientAccumulationSchedule,
    FreezeBN, GradientAccumulationScheduler, GradientCache, NoiseScale, RecalibrateBN, ScaledLR)
from fastaccum.testing import CrossEntropy, assert_same_run, deviation, one_cycle, toy, toy_data
from common import (BatchListLoader, CallAt, CpuLossScaling, LimitedMemory, RaiseAt, RecordAt, collect_warnings,
    in_chunks, nt_xent, overflow_on_sample, pick_cases, run_all_cases, runs_out_above, trim_padding, weights,
    weights_unchanged)
from on_processes import (AllReduceBytes, as_single_process, assert_equal_on_all_ranks, assert_same_as_single_process,
    distributed_learner, fit_single_and_distributed, flat_state, make_learner, on_processes, ordered_loader,
    restart_order, sample_orders, samples_of_steps, this_process)
from small_learners import all_params
from test_noise_scale import single_gradients, trace_and_grad_sq

two_or_more = (2,3) if run_all_cases else (2,)
# The number of samples of each process. By default, a step has 16 samples of each process, in
# micro-batches of 4
even,ragged,uneven,few = [32]*4,[35]*4,[40,25,18],[40,3,1]
AdamW = partial(OptimWrapper, opt=torch.optim.AdamW)

def scaled(): return [CpuLossScaling(init_scale=2.**10, growth_interval=3),GradientClip(0.05)]
def clip(to=0.01): return [GradientClip(to)]

# Models: each has 5 inputs and 3 outputs

def net(*more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5,6), nn.Tanh(), *more, nn.Linear(6,3)).double()
def with_batchnorm(): return net(nn.BatchNorm1d(6))
def with_limited_memory(): return net(LimitedMemory())
class Branches(Module):
    "A model whose first layer has no gradient in some micro-batches, because few samples use it"
    def __init__(self): self.net,self.first = net(),nn.Linear(5,5).double()
    def forward(self, x):
        uses_first = x[:,:1]>1
        return self.net(torch.where(uses_first, self.first(x), x) if uses_first.any() else x)
def with_tied_weights():
    m = net(nn.Linear(6,6), nn.Tanh(), nn.Linear(6,6))
    m[2].weight = m[4].weight
    return m
def with_unused_layer():
    m = net(LimitedMemory())
    m[1].unused = nn.Linear(2, 2).double()
    return m

# Fits, given a Learner and callbacks

def several_fits(learn, cbs):
    "Fit for no epoch, then twice, with callbacks that stay on the Learner and a validation in between"
    for cb in cbs: learn.add_cb(cb)
    learn.fit(0, 0.05)
    learn.fit(1, 0.05)
    learn.validate()
    learn.fit_flat_cos(1, 0.05)
def from_epoch_1(learn, cbs): learn.fit_one_cycle(3, 0.1, cbs=cbs, start_epoch=1)
def constant(learn, cbs): learn.fit(2, 0.1, cbs=cbs)
def with_small_rate(learn, cbs): learn.fit(2, 1e-3, cbs=cbs)
def decayed(learn, cbs): learn.fit_one_cycle(2, 0.01, wd=0.1, cbs=cbs)

# The run is that of a single process

def record_train_metrics(learn): learn.recorder.train_metrics = True
def cancel_second_step(learn):
    "Cancel all micro-batches of the second step, on all processes"
    if learn.train_iter==1: raise CancelBatchException
def overflow_on_second_process():
    return [CpuLossScaling(init_scale=2.**10),CallAt('after_loss', partial(overflow_on_sample, 40))]
def short_epochs(pct): return [ShortEpochCallback(pct)]
def trims(): return [CallAt('before_batch', trim_padding, run_valid=True)]

schedules = [lambda n: GradientAccumulationSchedule(n//4, n, finish=0.8),
    lambda n: GradientAccumulationSchedule(n//4, n, start=1, finish=2, drop_last=True),
    lambda n: GradientAccumulationScheduler({1:4}),
    lambda n: GradientAccumulationScheduler({0:2,3:3,9:1}, mode='step')]

same_runs = dict(
    few=[dict(ns=few)],
    the_default_size=[dict(ns=even, cb=lambda n: GradientAccumulation())],
    clipped=[dict(ns=uneven, opt_func=AdamW, cbs=clip, fit=decayed)],
    tied=[dict(ns=uneven, model=with_tied_weights, splitter=all_params, cbs=clip)],
    scaled=[dict(ns=ragged, cbs=o) for o in (scaled,overflow_on_second_process)],
    fits=[dict(ns=ragged, fit=several_fits)],
    from_an_epoch=[dict(ns=o, fit=from_epoch_1) for o in (ragged,uneven)],
    trimmed=[dict(ns=uneven, micro=2, tokens=True, cbs=trims)],
    class_weights=[dict(ns=uneven, tokens=True, loss_func=CrossEntropy(weight=torch.tensor([0.2,1.,3.]).double()))],
    sums=[dict(ns=uneven, loss_func=CrossEntropy(reduction='sum'), fit=with_small_rate)],
    split=[dict(ns=[36]*3, micro=12, per_process=12, acc=dict(micro_batch_size=4)),
        dict(ns=[50]*3, micro=[8,12,5], acc=dict(micro_batch_size=5)),
        dict(ns=uneven, micro=8, per_process=12, tokens=True, acc=dict(micro_batch_size=3)),
        dict(ns=even, micro=16, acc=dict(micro_batch_size=4), setup=record_train_metrics, metrics=[accuracy])],
    # with `drop_last`, the epoch of all processes ends when one process has no more samples
    drop_last=[dict(ns=[40,28,28], full_batch=False,
        cb=lambda n: GradientAccumulationScheduler({0:1,1:2}, drop_last=True))],
    train_metrics=[dict(ns=even, setup=record_train_metrics, metrics=[accuracy,AvgLoss()])],
    ways_to_wrap=[dict(ns=ragged, ddp=dict(bucket_cap_mb=1e-4)),
        dict(ns=uneven, ddp=dict(gradient_as_bucket_view=True), opt_func=AdamW),
        dict(ns=uneven, ddp=dict(find_unused_parameters=True), model=Branches, splitter=all_params),
        # here weight decay must not change a layer that no process uses
        dict(ns=ragged, ddp=dict(find_unused_parameters=True), model=with_unused_layer, splitter=all_params,
            fit=decayed)],
    schedules=[dict(ns=ns, cb=cb, fit=fit, full_batch=False)
        for cb,fit,ns in pick_cases(4, product(schedules, (one_cycle,from_epoch_1), (ragged,[64]*3)))],
    short_epochs=[dict(ns=ragged, cbs=partial(short_epochs, pct), fit=constant, full_batch=False,
        acc=dict(drop_last=drop_last)) for pct,drop_last in ((0.2,False),(0.6,False),(0.6,True))],
    micro_batches_recorded=[dict(ns=ragged, full_batch=False, acc=dict(log_accum_batch=False))],
    a_step_is_cancelled=[dict(ns=ragged, cbs=lambda: [RecordAt('after_loss', cancel_second_step, 7)], fit=constant)])

def pick_with(required, n, cases):
    "Return the `required` cases, and `n` of the other `cases`"
    return [*required,*pick_cases(n, [o for o in cases if o not in required])]

required = [(2,o) for o in ('schedules','class_weights','scaled','trimmed','short_epochs','a_step_is_cancelled')]
on_two,on_three = product([2], same_runs),product([3], ['few','drop_last','split','from_an_epoch'])
@pytest.mark.parametrize('n,case', pick_with(required, 7, [*on_two,*on_three]))
@on_processes(each_of=same_runs)
def test_the_run_is_that_of_one_process(**kwargs): assert_same_as_single_process(**kwargs)

class StepsLastLayer(Callback):
    "Steps the parameters that the Learner's optimizer does not have, with an optimizer of its own"
    def before_fit(self): self.o = torch.optim.SGD([*self.model.parameters()][2:], lr=.1)
    def after_step(self):
        self.o.step()
        self.o.zero_grad()

@on_processes(2)
def test_the_gradients_of_a_second_optimizer_are_those_of_all_processes():
    def first_layer(m): return [[*m.parameters()][:2]]
    assert_same_as_single_process(ragged, splitter=first_layer, cbs=lambda: [StepsLastLayer()], fit=constant)

class StepsProbe(Callback):
    "Trains a layer of its own on the predictions, as a probe does"
    def before_fit(self):
        self.layer = nn.Linear(3, 1).double()
        self.o = torch.optim.SGD(self.layer.parameters(), lr=.1)
    def after_pred(self): self.value = self.layer(self.pred.detach()).mean()
    def after_loss(self):
        if self.training: self.learn.loss_grad = self.learn.loss_grad+self.value
    after_step = StepsLastLayer.after_step

@on_processes(2)
def test_a_callback_of_one_process_may_have_an_optimizer_of_its_own():
    assert_same_as_single_process(ragged, cbs=lambda: [] if this_process.rank else [StepsProbe()], fit=constant)

@on_processes(2)
def test_memory_may_run_out_in_the_validation_of_one_process():
    "DDP copies BatchNorm's buffers in each forward pass, for which the other process would wait"
    def model(): return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), LimitedMemory(), nn.Linear(6, 3)).double()
    b = distributed_learner(even, model=model, splitter=all_params)
    limit_memory((0,), 'validation', cap=5)(b)
    acc = GradientAccumulation(16, micro_batch_size='auto')
    b.fit(1, 0., cbs=acc)
    with b.added_cbs(acc): validated = b.validate()
    assert (n_events['failed']>0)==(this_process.rank==0)
    for m in b.model.modules():
        if isinstance(m, LimitedMemory): m.runs_out = None
    assert deviation(validated, b.validate())<1e-6

@on_processes(2)
def test_a_process_with_only_padding_adds_nothing_to_the_step():
    "The losses of this process are no NaN"
    def pad(is_padding):
        "Return a callback that replaces all targets of some sequences by padding"
        def replace(l): l.yb = (torch.where(is_padding(l)[:,None], -100, l.y),)
        return [CallAt('before_batch', replace)]
    a,b = fit_single_and_distributed([9,9], micro=1, per_process=2, tokens=True,
        cbs=lambda: pad(lambda l: l.x[:,0,0]>0))
    assert deviation(weights(a), weights(b))<1e-12
    # in the full-batch run, a step of padding has NaN
    assert torch.stack(list(b.recorder.losses)).isfinite().all()
    # after the first step, all targets are padding, and the second process has no samples: the loss of the
    # first step is recorded again
    _,b = fit_single_and_distributed([40,3], tokens=True,
        cbs=lambda: pad(lambda l: torch.full((len(l.x),), l.train_iter>0)))
    losses = list(b.recorder.losses)
    assert deviation(losses, losses[:1]*len(losses))<1e-6
    for ns in ([35,35],[40,25]):
        of_second_process = toy_data(sum(ns), True).tensors[0][-ns[-1]:,0,0]
        def is_padding(l): return torch.isin(l.x[:,0,0], of_second_process) & (l.epoch==0)
        assert_same_as_single_process(ns, tokens=True, cbs=lambda: pad(is_padding))

def random_arguments(seed):
    "Return random arguments for the test below, which depend on `seed` only"
    rng = Random(seed)
    ns = [rng.choice([rng.randint(1, 4),rng.randint(20, 45)]) for _ in range(this_process.world_size)]
    micro = [rng.choice([1,2,3,5]) for _ in ns]
    per_process,drop_last = rng.randint(1, 14),rng.random()<.3
    sizes = [math.ceil(per_process/m)*m for m in micro]
    has_a_step = samples_of_steps(sample_orders(ns)[0], sizes, drop_last)
    if not has_a_step: return random_arguments(seed+1000)
    return dict(ns=ns, micro=micro, per_process=per_process, tokens=rng.random()<.4, opt_func=rng.choice([SGD,Adam]),
        fit=rng.choice([one_cycle,constant]), cbs=rng.choice([list,clip]), acc=dict(drop_last=drop_last))

@on_processes(2,3)
def test_random_runs_are_those_of_one_process():
    for seed in pick_cases(4, range(100)):
        try: assert_same_as_single_process(**random_arguments(seed))
        except Exception as e: raise AssertionError(f'run {seed}') from e

# The exchange of gradients and buffers

# of this process: the forward passes ('passes'), and the passes that ran out of memory ('failed')
n_events = Counter()

def limit_memory(ranks, stage='backward', after=0, cap=2):
    """Return a function `setup(learn)` that gives the processes in `ranks` memory for `cap` samples

    Memory runs out only in the distributed run, in passes of `stage`, after the first `after` forward
    passes.
    """
    def runs_out(this_stage, n):
        n_events['passes'] += this_stage=='forward'
        fails = this_stage==stage and n>cap and n_events['passes']>after
        n_events['failed'] += fails
        return fails
    def setup(learn):
        n_events.clear()
        is_limited = isinstance(learn.model, DDP) and this_process.rank in ranks
        for m in learn.model.modules():
            if is_limited and isinstance(m, LimitedMemory): m.runs_out = runs_out
    return setup

exchanging = dict(
    accumulated=[dict(), dict(ns=uneven), dict(ns=few), dict(tokens=True), dict(cbs=scaled),
        dict(micro=12, acc=dict(micro_batch_size=4))],
    ways_to_wrap=[dict(ddp=o) for o in (dict(bucket_cap_mb=1e-3), dict(find_unused_parameters=True))],
    recorded_and_measured=[dict(acc=dict(log_accum_batch=False)), dict(cbs=lambda: [NoiseScale(every=1)])],
    memory_runs_out=[dict(micro=8, acc=dict(micro_batch_size='auto'), setup=limit_memory((1,)))],
    annealed=[dict(ns=ns, cb=lambda n: GradientAccumulationSchedule(n//4, n)) for ns in (ragged,uneven)],
    cached=[dict(micro=16, cb=lambda n: GradientCache(micro_batch_size=3), loss_func=nt_xent),
        dict(micro=8, cbs=lambda: [GradientCache(micro_batch_size=3)], loss_func=nt_xent)])

@pytest.mark.parametrize('case', exchanging)
@on_processes(2, each_of=exchanging)
def test_each_step_exchanges_the_gradients_once(ns=ragged, cb=GradientAccumulation, acc=None, cbs=list, setup=None,
        **kwargs):
    "In each step, all-reduce sends the bytes of all gradients, and at most a tenth more"
    def with_large_gradients(): return nn.Sequential(nn.Linear(5,200), LimitedMemory(), nn.Linear(200,3)).double()
    b = distributed_learner(ns, model=with_large_gradients, **kwargs)
    if setup: setup(b)
    steps,all_reduce = RecordAt('after_step', lambda l: 1, order=60),AllReduceBytes()
    with all_reduce: b.fit(1, 0.01, cbs=[cb(32, **(acc or {})),steps,*cbs()])
    for o in (flat_state(b),b.recorder.lrs): assert_equal_on_all_ranks(o)
    if setup: assert (n_events['failed']>0)==(this_process.rank==1)
    n_steps,gradient_size = len(steps.values),sum(p.nbytes for p in b.model.parameters())
    assert n_steps>=3
    n_gradients = all_reduce.nbytes/gradient_size
    assert n_steps<=n_gradients<=1.1*n_steps, (n_gradients, n_steps)

@on_processes(2)
def test_half_precision_gradients_are_rounded_once():
    "Gradients in half precision are added up in single precision, over micro-batches and over processes"
    class Half(nn.Sequential):
        def forward(self, x): return super().forward(x.bfloat16()).float()
    def half(): return Half(nn.Linear(5,6), nn.Tanh(), nn.Linear(6,3)).bfloat16()
    def all_grads(l): return [p.grad.clone() for p in l.model.parameters()]
    loss,ns,ds = nn.CrossEntropyLoss(),[64,64],toy_data(128)
    for micro,acc in ((2,{}), (8,dict(micro_batch_size=2)), (2,dict(micro_batch_size='auto'))):
        b = distributed_learner(ns, micro, model=half, splitter=all_params, loss_func=loss)
        recorded = RecordAt('before_step', all_grads)
        b.fit(1, 0., cbs=[GradientAccumulation(128, **acc),recorded])
        ps,model = list(b.model.parameters()),b.model.module
        batches = [ds[idxs] for order in sample_orders(ns)[0] for idxs in in_chunks(order, 2)]
        of_batches = [torch.autograd.grad(loss(model(x), y), ps) for x,y in batches]
        for grad,*parts in zip(recorded.values[0], *of_batches):
            assert_equal_on_all_ranks(grad.float())
            parts = torch.stack(parts).float()
            mean,size = parts.mean(0),parts.abs().mean(0)
            # bfloat16 has 8 bits, so rounding once is at most 2**-8 of the mean; 64 sums in single
            # precision add little
            assert ((grad.float()-mean).abs()<=2.**-8*mean.abs()+2.**-18*size).all()

@on_processes(2)
def test_buffers_are_those_of_the_first_process():
    "No process waits for a broadcast, even if others have fewer micro-batches"
    auto = dict(micro_batch_size='auto')
    for ns,micro,acc in (([35,35],4,{}), ([40,24],4,{}), ([40,24],8,auto), ([35,35],8,auto),
            ([32,32],[16,4],dict(micro_batch_size=4))):
        b = distributed_learner(ns, micro, model=with_batchnorm)
        after_each_step = RecordAt('after_step', lambda l: assert_equal_on_all_ranks(flat_state(l)), order=60)
        b.fit(2, 0.1, cbs=[GradientAccumulation(32, **acc),after_each_step])
        assert len(b.recorder.losses)==2*math.ceil(ns[0]/16)
        if ns[0]==35: b.fit(1, 0.1)   # in a fit without accumulation, DDP broadcasts the buffers
        assert_equal_on_all_ranks(flat_state(b))

# Memory that runs out

def scheduler_from_epoch_1(n, **kwargs): return GradientAccumulationScheduler({1:3}, **kwargs)

oom_runs = dict(
    nowhere=[dict(ranks=(), acc=dict(drop_last=o)) for o in (True,False)],
    on_each_at_each_place=[dict(stage=stage, ranks=(rank,), after=after)
        for stage,rank,after in pick_cases(4, product(('forward','backward'), (0,1), (0,1,3,7)))],
    on_all=[dict(stage='forward', ranks=(0,1,2), cap=3), dict(ranks=(0,1,2), ns=uneven, cap=3)],
    different_loaders=[dict(ranks=(0,), ns=few), dict(ranks=(0,), ns=[40,33,17], micro=[8,16,4], tokens=True)],
    ways_to_wrap=[dict(ranks=(1,), ddp=dict(gradient_as_bucket_view=True, bucket_cap_mb=1e-4), opt_func=AdamW),
        dict(ranks=(0,), ddp=dict(find_unused_parameters=True), model=with_unused_layer, splitter=all_params,
            fit=decayed)],
    scaled_and_clipped=[dict(ranks=(1,), cbs=scaled)],
    fits=[dict(ranks=(1,), after=3, fit=several_fits)],
    schedules=[dict(ns=[48]*3, ranks=(0,), after=2, cb=cb, full_batch=False)
        for cb in (partial(GradientAccumulationSchedule, 16),scheduler_from_epoch_1)])

@pytest.mark.parametrize('n,case', pick_with([(2,'ways_to_wrap')], 4,
    [*product([2], oom_runs),(3,'on_all'),(3,'different_loaders')]))
@on_processes(each_of=oom_runs)
def test_memory_may_run_out_on_some_processes(ranks, stage='backward', after=0, cap=2, ns=ragged, micro=8, acc=None,
        model=with_limited_memory, **kwargs):
    "With `micro_batch_size='auto'` the run is that of one process with enough memory"
    acc = dict(micro_batch_size='auto')|(acc or {})
    setup = limit_memory(ranks, stage, after, cap)
    assert_same_as_single_process(ns, micro, model=model, setup=setup, acc=acc, **kwargs)
    assert (n_events['failed']>0)==(this_process.rank in ranks)

@pytest.mark.parametrize('how', pick_cases(2, ['memory','exception','interrupt']))
@on_processes(2)
def test_an_error_of_one_process_ends_the_fit_of_both(how):
    "The other process ends after its timeout at the latest, and DDP has its former state"
    b = distributed_learner(ragged, 8, model=with_limited_memory)
    b.model = DDP(b.model.module, process_group=dist.new_group(timeout=timedelta(seconds=4)))
    exc = dict(exception=RuntimeError, interrupt=KeyboardInterrupt).get(how)
    if exc is None: limit_memory((0,), 'forward', 0, 0)(b)
    fails_here = this_process.rank==0
    cbs = [RaiseAt('after_backward', exc, 5, skip=2)] if exc and fails_here else []
    with pytest.raises((RuntimeError,KeyboardInterrupt)) as e:
        b.fit(1, 0.1, cbs=[GradientAccumulation(32, micro_batch_size='auto'),*cbs])
    says_why = ('planted' if exc else 'a single sample') in str(e.value)
    assert says_why==fails_here
    assert b.model.require_backward_grad_sync

# The model's own `forward`, searches for learning rates, and saved fits

@on_processes(2)
def test_a_forward_of_the_instance_is_kept():
    """accelerate sets such a `forward` for mixed precision

    A call of `plan` in one process does not wait for the other.
    """
    b,calls,acc = distributed_learner(ragged),[],GradientAccumulation(32)
    forward_of_class = b.model.forward
    def own_forward(*args):
        calls.append(b.model.training)
        return forward_of_class(*args)
    b.model.forward = own_forward
    b.fit(1, 0.1, cbs=acc)
    assert vars(b.model)['forward'] is own_forward and calls.count(True)==9
    if this_process.rank==0: assert acc.plan(b.dls).steps==[2]

@on_processes(2)
def test_lr_find_gives_the_same_result_on_all_processes():
    "`lr_find` has a point for each step, and restores weights and optimizer"
    def fit(learn, cbs):
        for cb in cbs: learn.add_cb(cb)
        learn.fit(1, 0.05)
        def snapshot(): return deepcopy((learn.model.state_dict(),learn.opt.state_dict()['state']))
        before = snapshot()
        learn.found = learn.lr_find(num_it=30, show_plot=False).valley
        assert deviation(before, snapshot())==0
        learn.points = list(learn.recorder.lrs),list(learn.recorder.losses)
        # the search stops in the middle of an epoch, at a place that depends on the loader
        restart_order(learn)
        learn.fit(1, 0.05)
    for ns in (ragged,uneven):
        a,b = assert_same_as_single_process(ns, fit=fit, opt_func=Adam)
        assert len(a.points[0])>15 and deviation(a.points, b.points)<2e-6
        assert_equal_on_all_ranks(b.found)

@on_processes(2)
def test_lr_find_ends_if_one_process_has_more_batches_than_the_other():
    "fastai begins the search with another number of epochs on each process"
    b = distributed_learner([80,20], n_epoch=6)
    b.add_cb(GradientAccumulation(32))
    b.lr_find(num_it=10, show_plot=False)
    assert len(b.recorder.losses)==10

@on_processes(2)
def test_a_fit_is_resumed_from_a_checkpoint():
    "The fit continues from a file of `SaveModelCallback`, as the page on saving describes"
    for acc in (partial(GradientAccumulation, 32),partial(GradientAccumulationSchedule, 16, 48)):
        def fit(learn, *more, **kwargs):
            cbs = [acc(),SaveModelCallback(every_epoch=True, with_opt=True),*more]
            learn.fit_one_cycle(4, 0.1, wd=0.1, cbs=cbs, **kwargs)
        whole,interrupted,resumed = (distributed_learner(ragged, n_epoch=4, opt_func=Adam) for _ in range(3))
        fit(whole)
        fails_in_epoch_2 = RaiseAt('after_backward', RuntimeError, 5, skip=9*2+5)
        with pytest.raises(RuntimeError, match='planted'): fit(interrupted, fails_in_epoch_2)
        resumed.load('model_1', with_opt=True)
        restart_order(resumed, epoch=2)
        fit(resumed, start_epoch=2)
        n_steps = len(resumed.recorder.lrs)
        def result(learn): return flat_state(learn),learn.opt.state_dict(),list(learn.recorder.lrs)[-n_steps:]
        assert deviation(result(whole), result(resumed))<1e-12

# Fits in fastai's `distrib_ctx`, which uses accelerate and `DistributedDL`

accelerated = pytest.mark.skipif(find_spec('accelerate') is None, reason='fastai.distributed needs accelerate')
def broadcast_on_cpu():
    "Replace fastai's `DistributedDL._broadcast`, which calls `.cuda()`"
    from fastai.distributed import DistributedDL
    def broadcast(self, t, rank):
        t = torch.LongTensor(t)
        dist.broadcast(t, rank)
        return t.tolist()
    DistributedDL._broadcast = broadcast

@accelerated
@pytest.mark.parametrize('case', range(3))
@on_processes(2)
def test_the_run_in_distrib_ctx_is_that_of_one_process(case):
    broadcast_on_cpu()
    n,tokens,loader_drop_last,metrics = [
        (64,False,False,accuracy), (69,True,False,None), (66,False,True,None)][case]
    ds,rng,n_each = toy_data(n, tokens),Random(1),math.ceil(n/2)
    epochs = [rng.sample(range(n), n) for _ in range(2)]
    def parts(order):
        "Return the samples of each process, as many as `DistributedDL` gives each"
        keep = n_each//4*4 if loader_drop_last else n_each
        return [p[:keep] for p in in_chunks(order+order[:1], n_each)[:2]]
    steps = [samples_of_steps(parts(o), [16,16]) for o in epochs]
    a = make_learner(BatchListLoader(ds, steps), ds, metrics=metrics)
    order = iter(epochs)
    train = DataLoader(ds, bs=4, n=n, drop_last=loader_drop_last, get_idxs=lambda: next(order))
    b = make_learner(train, ds, metrics=metrics)
    for o in (a,b): o.recorder.train_metrics = metrics is not None
    with as_single_process(): one_cycle(a, [])
    with b.distrib_ctx(sync_bn=False, cpu=True): one_cycle(b, [GradientAccumulation(32, drop_last=False)])
    assert_equal_on_all_ranks(flat_state(b))
    assert not isinstance(b.model, DDP)
    # the other values are means over this process's validation samples
    n_train_values = 2 if metrics else 1
    for o in (a,b): o.recorder.values = [v[:n_train_values] for v in o.recorder.values]
    assert_same_run(a, b)

@accelerated
@on_processes(2)
def test_searches_in_distrib_ctx_give_the_same_results_on_all_processes():
    broadcast_on_cpu()
    order = Random(1).sample(range(64), 64)
    b = make_learner(ordered_loader(toy_data(64), [order], 4), toy_data(64), cbs=GradientAccumulation(32))
    with weights_unchanged(b), b.distrib_ctx(sync_bn=False, cpu=True):
        found = b.lr_find(num_it=30, show_plot=False).valley
    assert_equal_on_all_ranks([found,*b.recorder.lrs])
    assert len(b.recorder.lrs)>15
    b = learner_with_caps(less_on(0), wrap=False)
    with b.distrib_ctx(sync_bn=False, cpu=True): res = b.bs_find('binsearch', show_plot=False)
    assert int(res)==9 and not isinstance(b.model, DDP)

# Refused

# The single process runs these functions without callbacks, and they do nothing: the fit of several
# processes is refused
def fit_distributed(learn, cbs): return cbs and learn.fit(1, cbs=cbs)
def find_distributed(learn, cbs): return cbs and learn.accum_find()
def check_distributed(learn, cbs): return cbs and learn.accum_check()
def different_epochs(learn, cbs): learn.fit(1+(this_process.rank if cbs else 0), 0.1, cbs=cbs)

needs_one_process = 'in 2 processes.*in a single process'
refused = dict(
    accum_bs=('accum_bs', dict(ns=even, cb=lambda n: GradientAccumulation(16+this_process.rank))),
    drop_last=('drop_last', dict(ns=even, cb=lambda n: GradientAccumulation(16, drop_last=this_process.rank>0))),
    epochs=('epochs', dict(ns=even, fit=different_epochs)),
    final_size=('different steps', dict(ns=even,
        cb=lambda n: GradientAccumulationSchedule(16, 24+8*this_process.rank))),
    finish=('different steps', dict(ns=even,
        cb=lambda n: GradientAccumulationSchedule(16, 64, finish=0.3+0.6*this_process.rank))),
    scheduling=('different steps', dict(ns=even, cb=lambda n: GradientAccumulationScheduler({1:2+this_process.rank}))),
    # batches are also cut where a step ends, so 22 samples give 8 micro-batches, and 23 samples give 9
    counts_split_and_recorded=('22 samples.*23 samples', dict(ns=[22,23],
        acc=dict(micro_batch_size=3, log_accum_batch=False))),
    counts_recorded=('micro-batches', dict(ns=uneven, acc=dict(log_accum_batch=False))),
    auto_recorded=('auto', dict(ns=even, acc=dict(micro_batch_size='auto', log_accum_batch=False))),
    counts_of_metrics=('micro-batches', dict(ns=uneven, setup=record_train_metrics, metrics=[accuracy])),
    no_step=('too few', dict(ns=even, per_process=64, acc=dict(drop_last=True), fit=fit_distributed)),
    no_samples=('no samples.*35, 0', dict(ns=[35,0])),
    find=(needs_one_process, dict(ns=ragged, fit=find_distributed)),
    check=(needs_one_process, dict(ns=ragged, fit=check_distributed)))

@pytest.mark.parametrize('case', refused)
@on_processes(2)
def test_what_cannot_work_is_refused_on_all_processes(case):
    message,kwargs = refused[case]
    with pytest.raises((ValueError,RuntimeError), match=message): fit_single_and_distributed(**kwargs)

@on_processes(2)
def test_each_process_warns_of_its_communication_hook_and_one_process_of_the_step_size():
    "fastaccum does not call the communication hook of DDP, and rounds the size of a step up"
    b = distributed_learner(even)
    b.model.register_comm_hook(None, lambda state,bucket: 1/0)
    with collect_warnings() as collected: b.fit(1, cbs=GradientAccumulation(17))
    def was_warned(words): return any(words in str(o.message) for o in collected)
    assert was_warned('a step has 24 samples')==(this_process.rank==0)
    assert was_warned('communication hook')

@on_processes(2)
def test_the_cache_warns_that_a_communication_hook_is_not_used():
    for cbs in ([GradientCache(micro_batch_size=2)], [GradientCache(micro_batch_size=2),GradientAccumulation(16)]):
        b = distributed_learner(even, loss_func=nt_xent)
        b.model.register_comm_hook(None, lambda state,bucket: 1/0)
        with collect_warnings() as collected: b.fit(1, cbs=cbs)
        assert sum('communication hook' in str(o.message) for o in collected)==1

def cancel_on(rank, event, exc, i=1):
    "Return a callback that cancels micro-batch `i` on process `rank`, or on all processes if it is None"
    def cancel(learn):
        # an attribute of the callback, because a trial of the loss restores those
        cb.n_heard += 1
        if cb.n_heard-1==i and rank in (None,this_process.rank): raise exc
    cb = CallAt(event, cancel)
    cb.n_heard = 0
    return cb

@pytest.mark.parametrize('kind', ['wrong','unknown'])
@on_processes(2)
def test_a_trial_does_not_wait_for_a_process_that_has_seen_something_else(kind):
    "The loss exchanges data in each call. Only on process 0, it compares samples, or is the same for all of them"
    def loss(p, y):
        n = torch.tensor(float(len(y)))
        dist.all_reduce(n)
        res = F.cross_entropy(p, y)+0*n
        if this_process.rank==1: return res
        return res+p.mean(0).square().sum() if kind=='wrong' else 0*res+1
    learn = distributed_learner(even, loss_func=loss)
    with collect_warnings() as told: learn.fit(2, 0.01, cbs=GradientAccumulation(16))
    entries = [str(o.message).partition('.html#')[2] for o in told]
    assert ('loss-not-a-mean' in entries)==(kind=='wrong' and this_process.rank==0)

recorded = dict(every_micro_batch=dict(acc=dict(log_accum_batch=False)),
    metrics=dict(setup=record_train_metrics, metrics=[accuracy]))
@pytest.mark.parametrize('case', recorded)
@on_processes(2)
def test_if_each_micro_batch_is_recorded_none_may_be_cancelled_on_one_process_only(case):
    def fit_with(rank, event, exc):
        kwargs = dict(recorded[case])
        learn = distributed_learner(even, metrics=kwargs.get('metrics'))
        kwargs.get('setup', noop)(learn)
        learn.fit(1, cbs=[GradientAccumulation(16, **kwargs.get('acc', {})),cancel_on(rank, event, exc)])
    for event,exc in (('before_batch',CancelBatchException), ('after_loss',CancelBatchException),
            ('before_backward',CancelBackwardException)):
        with pytest.raises(RuntimeError, match='cancelled a micro-batch on 1 of 2 processes'): fit_with(1, event, exc)
        fit_with(None, event, exc)   # no error if all processes cancel it

class BackwardByHand(Callback):
    "On process 1, runs the backward pass of each micro-batch itself, which changes nothing"
    def before_backward(self):
        if this_process.rank==1: raise CancelBackwardException
    def after_cancel_backward(self): self.learn.loss_grad.backward()

@pytest.mark.parametrize('case', recorded)
@on_processes(2)
def test_a_backward_pass_that_a_callback_runs_on_one_process_counts(case):
    def weights(*cbs):
        kwargs = dict(recorded[case])
        learn = distributed_learner(even, metrics=kwargs.get('metrics'))
        kwargs.get('setup', noop)(learn)
        learn.fit(1, cbs=[GradientAccumulation(16, **kwargs.get('acc', {})),*cbs])
        return [p.detach().clone() for p in learn.model.parameters()]
    assert all(map(torch.equal, weights(), weights(BackwardByHand())))

@on_processes(2)
def test_the_run_with_static_graph_of_ddp_is_right_or_refused():
    def cache(n): return GradientCache(micro_batch_size=3)
    for cb,loss in ((GradientAccumulation,CrossEntropy()), (cache,nt_xent)):
        try: assert_same_as_single_process(ragged, cb=cb, ddp=dict(static_graph=True), loss_func=loss)
        except ValueError as e: assert 'static_graph' in str(e)

# Other callbacks and searches

def penalize(l): l.loss_grad = l.loss_grad+0.1*sum(p.pow(2).sum() for p in l.model.parameters())

cached = dict(
    sizes=[dict(ns=[n]*2, size=s) for n,s in ((35,3),(32,10),(33,2))], different_sizes=[dict(size=[2,3,10])],
    wrapped=[dict(ddp=dict(bucket_cap_mb=1e-4)), dict(ddp=dict(find_unused_parameters=True))],
    penalties=[dict(cbs=lambda: [CallAt('after_loss', penalize),*clip(0.05)]), dict(cbs=scaled, opt_func=Adam)],
    accumulated=[dict(cbs=lambda: [GradientAccumulation(20*this_process.world_size, drop_last=False)])],
    memory_runs_out=[dict(size='auto', oom_rank=rank, stage=stage)
        for rank in (0,1) for stage in ('forward','backward')])

@pytest.mark.parametrize('n,case', pick_cases(4, [*product([2], cached),(3,'different_sizes'),(3,'accumulated')]))
@on_processes(each_of=cached)
def test_the_cache_does_not_change_the_run(ns=ragged, size=3, cbs=list, oom_rank=None, stage=None, **kwargs):
    "With and without `GradientCache`, the loss of a process compares the samples of its own batch only"
    a,b = (distributed_learner(ns, 10, loss_func=nt_xent, model=with_limited_memory, **kwargs) for _ in range(2))
    if oom_rank is not None: limit_memory((oom_rank,), stage, after=1)(b)
    if isinstance(size, list): size = size[this_process.rank]
    one_cycle(a, cbs())
    one_cycle(b, [*cbs(),GradientCache(micro_batch_size=size)])
    assert_same_run(a, b)
    assert_equal_on_all_ranks(flat_state(b))
    assert (n_events['failed']>0)==(this_process.rank==oom_rank)

class CountsCalls(Module):
    "A layer with a buffer that grows differently in each process; notes the buffer at the first call of a batch"
    def __init__(self): self.register_buffer('n', torch.zeros(()))
    def forward(self, x):
        if self.is_first: self.noted.append(self.n.item())
        self.is_first = False
        self.n += 1+this_process.rank
        return x

@on_processes(2)
def test_a_cancelled_batch_does_not_end_the_exchange_of_buffers():
    counts = CountsCalls()
    counts.noted = []
    def begin(learn): counts.is_first = True
    def cancel(learn):
        if learn.iter==1: raise CancelBatchException
    b = distributed_learner(even, 8, loss_func=nt_xent, model=lambda: net(counts))
    b.fit(1, cbs=[GradientCache(micro_batch_size=3),CallAt('before_batch', begin),CallAt('after_loss', cancel)])
    assert_equal_on_all_ranks(counts.noted)

@on_processes(2)
def test_checkpoints_and_the_noise_scale_change_no_bit_of_the_run():
    "The model has dropout and BatchNorm"
    checkpoint,meter = partial(ActivationCheckpoint, nn.Linear),partial(NoiseScale, every=1)
    draws = dict(model=lambda: net(nn.BatchNorm1d(6), nn.Dropout()))
    for cb,accum_bs,kwargs in [(checkpoint,None,draws), (checkpoint,32,draws),
            (checkpoint,None,dict(draws, ddp=dict(find_unused_parameters=True))),
            (checkpoint,None,dict(draws, ddp=dict(static_graph=True))),
            (meter,32,dict()), (meter,32,dict(ns=uneven, tokens=True))]:
        a,b = (distributed_learner(**dict(ns=ragged)|kwargs) for _ in range(2))
        for learn,more in ((a,[]), (b,[cb()])):
            torch.manual_seed(this_process.rank)
            accumulation = [GradientAccumulation(accum_bs)] if accum_bs else []
            one_cycle(learn, [*accumulation,*more])
        assert_equal_on_all_ranks(weights(b))
        assert torch.equal(flat_state(a), flat_state(b)) and list(a.recorder.losses)==list(b.recorder.losses)

@on_processes(2)
def test_recalibrated_statistics_are_those_of_all_samples():
    "All processes have the same statistics"
    ds,order = toy_data(64),[list(range(48)),list(range(48, 64))]   # 3 batches of 16, and 1 batch
    train = ordered_loader(ds, [order[this_process.rank]], 4)
    b = make_learner(train, ds, ddp={}, model=with_batchnorm, splitter=all_params)
    m = b.model.module
    b.recalibrate_bn(16)
    with torch.no_grad(): inputs = m[:2](ds.tensors[0])
    torch.testing.assert_close(m[2].running_mean, inputs.mean(0))
    torch.testing.assert_close(m[2].running_var, torch.stack([o.var(0) for o in inputs.split(16)]).mean(0))
    assert m[2].num_batches_tracked==4
    # DDP itself accepts SyncBatchNorm on GPUs only
    b.model.module = nn.SyncBatchNorm.convert_sync_batchnorm(m)
    for f in (lambda: b.recalibrate_bn(16),lambda: b.fit(1, cbs=RecalibrateBN()),lambda: b.bs_find(show_plot=False)):
        with pytest.raises(RuntimeError, match='SyncBatchNorm'): f()

@pytest.mark.parametrize('case', ['even','uneven','sums','scaled'])
@on_processes(*two_or_more)
def test_the_noise_scale_is_measured_from_the_micro_batches_of_all_processes(case):
    ns = dict(even=[16,16,16], uneven=[16,9,3]).get(case, [15]*3)[:this_process.world_size]
    meter = NoiseScale(every=1)
    b = distributed_learner(ns, loss_func=CrossEntropy(reduction='sum' if case=='sums' else 'mean'))
    more = scaled() if case=='scaled' else []
    b.fit(1, 0., cbs=[GradientAccumulation(16*this_process.world_size, drop_last=False),meter,*more])
    b.model = b.model.module
    micro_batches = [idxs for order in sample_orders(ns)[0] for idxs in in_chunks(order, 4)]
    expected = trace_and_grad_sq(single_gradients(b)[sum(micro_batches, [])], [len(o) for o in micro_batches])
    assert deviation((meter.trace,meter.grad_sq), expected)<1e-5
    assert len(b.recorder.noise_scale)==1

@on_processes(2)
def test_scaled_lr_counts_all_processes():
    "Without accumulation, it also works with `static_graph`, which accumulation refuses"
    for ddp in (dict(),dict(static_graph=True)):
        a,b = (distributed_learner(ragged, ddp=ddp) for _ in range(2))
        a.fit(1, 0.2)
        b.fit(1, 0.1, cbs=ScaledLR(base_bs=2*this_process.world_size))   # batches of 4 on each process
        torch.testing.assert_close(flat_state(b), flat_state(a))
        assert list(b.recorder.lrs)==list(a.recorder.lrs)
    b = distributed_learner(ragged)
    b.fit(1, 0.01, cbs=[GradientAccumulation(32),ScaledLR(base_bs=8)])
    assert deviation(list(b.recorder.lrs), [.01*4]*3)<1e-12

def learner_with_caps(caps, stage='backward', wrap=True, n=70):
    "Return a Learner for `bs_find`: process `r` has memory for `caps[r]` samples"
    def model(): return net(nn.BatchNorm1d(6), LimitedMemory(runs_out_above(caps[this_process.rank], stage)))
    b = toy(4, data=toy_data(n), splitter=all_params, opt_func=Adam, model=model)
    if wrap: b.model = DDP(b.model)
    return b
def less_on(rank, cap=9):
    "Return the caps of all processes, in samples: `cap` on process `rank`, and 50 on the others"
    return [cap if r==rank else 50 for r in range(this_process.world_size)]

@on_processes(*two_or_more)
def test_bs_find_finds_the_size_that_fits_on_all_processes():
    "`bs_find` also restores the whole state"
    for rank,stage in ((0,'forward'),(this_process.world_size-1,'backward')):
        b = learner_with_caps(less_on(rank), stage)
        if rank: b.fit(1, 0.01)
        def snapshot():
            return deepcopy((b.model.state_dict(),b.opt.state_dict() if b.opt else 0,
                [p.grad for p in b.model.parameters()],torch.get_rng_state()))
        before,ddp = snapshot(),b.model
        res = b.bs_find('binsearch', show_plot=False)
        assert int(res)==9 and f'each of {this_process.world_size} processes' in repr(res)
        assert deviation(before, snapshot())==0 and b.model is ddp and (b.opt is None)==(rank==0)

@on_processes(2)
def test_bs_find_gives_the_same_result_or_error_on_all_processes():
    """A fit with this size runs

    The errors: no size fits, arguments differ between processes, or a process failed.
    """
    b = learner_with_caps(less_on(1))
    assert int(b.bs_find(show_plot=False, apply=True))==8==b.dls.train.bs
    b.fit(1, 0.01, cbs=GradientAccumulation(64))
    assert_equal_on_all_ranks(flat_state(b))
    res = learner_with_caps([50,50], n=40 if this_process.rank else 30).bs_find(show_plot=False)
    assert int(res)==30 and 'no more' in repr(res)   # limited by the process with the fewest samples
    b = learner_with_caps(less_on(0, cap=0))
    with pytest.raises(torch.OutOfMemoryError, match='no batch fits'): b.bs_find(show_plot=False)
    b = learner_with_caps([50,50])
    with pytest.raises(ValueError, match='init_val'): b.bs_find(init_val=2+this_process.rank, show_plot=False)
    b = learner_with_caps([50,50])
    exc,message = [(RuntimeError,'failed on process 1'),(ZeroDivisionError,'zero')][this_process.rank]
    if this_process.rank==1: b.model.module[0].register_forward_hook(lambda *_: 1/0)
    with weights_unchanged(b), pytest.raises(exc, match=message): b.bs_find(show_plot=False)
    assert isinstance(b.model, DDP)

@on_processes(2)
def test_a_fit_that_is_cut_short_leaves_nothing_behind():
    "The next fits, with and without accumulation, are those of a new Learner"
    def fit(acc, event=None, exc=None, **kwargs):
        """Fit, accumulating if `acc`; with `event`, before that run a fit that `exc` ends there

        Return the weights.
        """
        b = distributed_learner(ragged, opt_func=SGD)
        if event:
            cb = RaiseAt(event, exc, 7, skip=1 if event in ('after_backward','after_batch') else 5)
            try: b.fit(1, 0., cbs=[GradientAccumulation(32, **kwargs),cb])
            except (KeyboardInterrupt,RuntimeError): pass
            assert cb.raised
            restart_order(b)
        b.fit(1, 0.1, cbs=GradientAccumulation(32) if acc else None)
        return flat_state(b)
    expected = [fit(o) for o in (False,True)]
    events = ('before_batch','after_pred','after_loss','before_backward','after_backward','after_batch')
    cuts = product(events, (KeyboardInterrupt,RuntimeError,CancelFitException), (None,'auto'))
    for event,exc,size in pick_cases(5, cuts):
        for acc in (False,True):
            assert deviation(fit(acc, event, exc, micro_batch_size=size), expected[acc])<1e-12, (event,exc)

# Sharded models

def fsdp2(): return fully_shard(with_batchnorm(), mesh=init_device_mesh('cpu', (this_process.world_size,)))
def fsdp2_after_validation():
    model = fsdp2()
    # a forward pass does this too: parameters are then plain tensors, which do not show the sharding
    model.unshard()
    return model
def fsdp1(): return type('FullyShardedDataParallel', (nn.Sequential,), {})(with_batchnorm())
def one_dtensor():
    model = with_batchnorm()
    parallelize_module(model[0], init_device_mesh('cpu', (this_process.world_size,)), ColwiseParallel())
    return model

gathers_on_cpu = pytest.mark.skipif(not hasattr(torch.cpu.Stream, 'record_event'), reason='PyTorch 2.6 gathers on GPUs')

@pytest.mark.parametrize('model', [fsdp2,pytest.param(fsdp2_after_validation, marks=gathers_on_cpu),fsdp1,one_dtensor])
@on_processes(2)
def test_sharded_models_are_refused(model):
    "Each callback or search that needs whole gradients refuses before a weight changes"
    b = distributed_learner(ragged, ddp=None, model=model, splitter=all_params)
    def fit(*cbs): return partial(b.fit, 1, 0.1, cbs=cbs)
    def whole_weights():
        return [(p.full_tensor() if hasattr(p, 'full_tensor') else p).detach().clone() for p in b.model.parameters()]
    before = whole_weights()
    for f in (b.recalibrate_bn, b.bs_find, fit(GradientAccumulation(32)), fit(GradientAccumulation(32),NoiseScale()),
            fit(GradientCache(micro_batch_size=2)), fit(ActivationCheckpoint()), fit(ScaledLR(base_bs=8)),
            fit(RecalibrateBN())):
        with pytest.raises(ValueError, match='sharded over processes.*use DistributedDataParallel'): f()
    assert all(map(torch.equal, before, whole_weights()))
