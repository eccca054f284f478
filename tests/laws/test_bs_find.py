"""`learn.bs_find()` finds the largest micro-batch that fits in memory, and changes nothing else.

Whether it restores the whole state of a Learner is tested in test_dry_runs.py.
"""
import gc, numpy as np, pytest, time, torch, weakref
from functools import partial
from matplotlib import pyplot as plt
from torch import nn
from torch.utils.data import DataLoader as TorchLoader, IterableDataset, TensorDataset
from fastai.text.all import (Adam, CancelFitException, CancelStepException, DataLoader, DataLoaders,
    GradientClip, LMDataLoader, Learner, OptimWrapper, ProgressCallback, SortedDL, WeightedDL, pad_input)
from fastaccum.testing import toy, toy_data
from common import CallAt, CpuMixedPrecision, LimitedMemory, RecordAt, pick_cases, with_float32_inputs
from small_learners import all_params, silence_in_double
from test_dry_runs import unchanged

def oom(): return torch.OutOfMemoryError('planted')

def capped(cap, where='forward', exc=oom, n=120, mid=nn.Tanh, cbs=(), **kwargs):
    """Return a Learner that runs out of memory with more than `cap` samples, and raises `exc()` there

    `where` is 'forward' or 'backward', or an event of callbacks, in which a callback raises the error.
    """
    def check(stage, n):
        if stage==where and n>cap: raise exc()
    def model(): return nn.Sequential(nn.Linear(5, 6), mid(), LimitedMemory(check), nn.Linear(6, 3)).double()
    in_callback = CallAt(where, lambda l: l.model[2].check(where, l.dls.train.bs), order=0)
    more = [] if where in ('forward','backward') else [in_callback]
    return toy(4, n=n, model=model, cbs=[*cbs,*more], **kwargs)

def find_bs(learn, mode='binsearch', **kwargs): return learn.bs_find(mode, show_plot=False, **kwargs)

@pytest.mark.parametrize('cap,mode', [(o,mode) for mode in ('power','binsearch') for o in pick_cases(8, range(1, 101))])
def test_it_finds_the_largest_size_that_fits(cap, mode):
    "With `mode='power'`, that is the largest power of 2"
    res = find_bs(capped(cap), mode, steps_per_trial=2)
    assert int(res)==res.size==(cap if mode=='binsearch' else 2**(cap.bit_length()-1)), res
    assert all(o.ok==(o.size<=cap) for o in res.trials)

class OnCpu(nn.DataParallel):
    "`DataParallel` on a CPU, where PyTorch's class has no devices; `sizes` are those of its batches"
    sizes = set()
    def __init__(self, model):
        nn.Module.__init__(self)
        self.module = model
    def forward(self, x):
        self.sizes.add(len(x))
        return self.module(x)

def test_a_model_in_dataparallel_is_tried_with_its_wrapper():
    "The wrapper divides a batch among several GPUs, so a larger batch fits than on a single one"
    learn = capped(8, splitter=all_params)
    learn.model = OnCpu(learn.model)
    res = find_bs(learn)
    assert res.size==8 and OnCpu.sizes=={o.size for o in res.trials}

@pytest.mark.parametrize('where', ['forward','backward','before_batch','after_loss','before_step'])
@pytest.mark.parametrize('exc', [oom,MemoryError])
def test_it_finds_the_size_wherever_memory_runs_out(where, exc): assert find_bs(capped(13, where, exc)).size==13

# Messages of errors that PyTorch raises where memory runs out, and that are no OutOfMemoryError
texts = ['CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported', 'std::bad_alloc',
    'MPS backend out of memory (MPS allocated: 17.90 GB)', 'XPU out of memory. Tried to allocate 2.00 GiB',
    'CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`', 'Invalid buffer size: 24.00 GiB',
    'cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear',
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to",
    'Unable to find a valid cuDNN algorithm to run convolution',
    'unable to mmap 64 bytes from file </torch_1>: Cannot allocate memory (12)']
def allocate_too_much(): torch.empty(2**58, dtype=torch.uint8)   # no machine has that many bytes

@pytest.mark.parametrize('exc', [allocate_too_much,partial(OSError, 12, 'x'),
    *(partial(RuntimeError, o) for o in texts)])
def test_each_kind_of_out_of_memory_error_is_recognized(exc): assert find_bs(capped(5, exc=exc)).size==5

@pytest.mark.parametrize('exc', [ValueError('out of memory'),RuntimeError('CUDA error: device-side assert triggered'),
    IndexError('x'),OSError(28, 'No space left on device'),SystemExit(3)], ids=repr)
def test_other_errors_are_raised_as_they_are(exc):
    with pytest.raises(type(exc)) as info: find_bs(capped(5, exc=lambda: exc))
    assert info.value is exc

def test_the_measured_speed_of_a_compiled_model_leaves_out_the_compilation():
    "Here, compiling takes a second for each new batch size, and a step takes milliseconds"
    def slow_backend(graph, inputs):
        time.sleep(1)
        return graph.forward
    learn = toy(4, n=16)
    learn.model.compile(backend=slow_backend)
    trials = find_bs(learn, 'power').trials
    assert [o.size for o in trials]==[2,4,8,16]
    # if compilation counted, a trial of three steps would take more than 0.3 seconds a step
    assert all(o.speed>o.size/.2 for o in trials), trials

def test_an_error_is_raised_if_no_size_fits():
    with pytest.raises(torch.OutOfMemoryError, match='not even a batch of 1 sample:.*planted'):
        find_bs(capped(0), init_val=8)
    # BatchNorm cannot train on a single sample
    with pytest.raises(torch.OutOfMemoryError, match='not even a batch of 1 sample'):
        find_bs(capped(1, mid=lambda: nn.BatchNorm1d(6)))

def test_the_size_is_limited_by_the_samples_and_by_the_number_of_trials():
    res = find_bs(capped(1000, n=50))
    assert [o.size for o in res.trials]==[2,4,8,16,32,50] and res.size==50 and 'no more' in repr(res)
    assert [o.size for o in find_bs(capped(1000, n=3), init_val=64).trials]==[3]
    res = find_bs(capped(1000), max_trials=3)
    assert (res.size,len(res.trials))==(8,3) and 'max_trials' in repr(res)

# A trial, in which `bs_find` trains with one batch size, is a real fit

@pytest.mark.parametrize('n', [1,2,5])
def test_a_trial_takes_real_steps(n):
    "A trial takes at least two steps: in the second, memory also holds gradients and optimizer state"
    # lists outside of callbacks, because `bs_find` restores the attributes of callbacks
    has_grads,steps = [],[]
    def has_grad(l): has_grads.append(l.model[0].weight.grad is not None)
    def step(l): steps.append((len(l.x),bool(l.opt.state),l.model[0].weight.grad.any().item()))
    cbs = [CallAt('after_pred', has_grad),CallAt('after_step', step)]
    find_bs(capped(1000, n=16, opt_func=partial(OptimWrapper, opt=torch.optim.Adam), cbs=cbs), steps_per_trial=n)
    assert steps==[(o,True,True) for o in (2,4,8,16) for _ in range(max(n, 2))]
    assert all(o for i,o in enumerate(has_grads) if i%max(n, 2))

def test_a_step_that_the_scaler_skips_is_not_counted():
    taken,cbs = [],[CpuMixedPrecision(init_scale=2.**16),
        RecordAt('after_step', lambda l: taken.append(not l.mixed_precision.skipped), order=20)]
    data = TensorDataset(torch.randn(8, 5)*200, torch.randint(0, 3, (8,)))
    learn = toy(4, data=data, model=lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)),
        loss_func=lambda p,t: nn.functional.cross_entropy(p, t)*1e3, cbs=cbs)
    assert find_bs(learn, init_val=8).size==8 and taken.count(True)==3 and taken.count(False)>0

@pytest.mark.parametrize('event,exc', [('before_batch',CancelFitException),('after_batch',CancelFitException),
    ('before_step',CancelStepException)])
def test_the_search_fails_if_a_callback_ends_the_fit_or_skips_steps(event, exc):
    "Without a step, a trial does not show that its size fits"
    def end(learn): raise exc
    with pytest.raises(RuntimeError, match='a trial took only'): find_bs(capped(5, cbs=[RecordAt(event, end)]))

# Precision and memory

@pytest.mark.parametrize('mode,where', [('fp16','backward'),('bf16','forward')])
def test_trials_of_a_learner_in_mixed_precision_have_its_precision(mode, where):
    "After the search, autocast is off again"
    dtypes,dtype = set(),torch.float16 if mode=='fp16' else torch.bfloat16
    def see(l): dtypes.add(torch.get_autocast_dtype('cpu') if torch.is_autocast_enabled('cpu') else None)
    cbs = [CpuMixedPrecision(amp_mode=mode),GradientClip(),RecordAt('after_pred', see)]
    learn = capped(9, where, data=with_float32_inputs(toy_data(40)), cbs=cbs)
    learn.model.float()
    with unchanged(learn): assert find_bs(learn).size==9
    assert dtypes=={dtype} and not torch.is_autocast_enabled('cpu')

@pytest.mark.parametrize('cap', [0,9])
def test_the_memory_of_a_trial_is_freed_before_the_next_trial_and_at_the_end(cap):
    "Even that of tensors in a reference cycle. With a `cap` of 0, no size fits"
    refs,alive = [],[]
    class Cycle(nn.Module):
        def forward(self, x):
            alive.extend(n for n,ref in refs if n!=len(x) and ref() is not None)
            held = {'x':x.clone()}
            held['self'] = held
            refs.append((len(x),weakref.ref(held['x'])))
            return held['x']
    learn = capped(cap, mid=Cycle, opt_func=Adam)
    gc.disable()
    try: find_bs(learn) if cap else pytest.raises(torch.OutOfMemoryError, find_bs, learn)
    finally: gc.enable()
    gc.collect()
    assert refs and not alive and not any(ref() is not None for _,ref in refs)

# Loaders of all kinds

class Tokens(nn.Module):
    "A model that runs out of memory with more than `cap` tokens; it may average over a dimension `over`"
    def __init__(self, cap, over): super().__init__(); self.cap,self.over,self.lin = cap,over,nn.Linear(1, 2)
    def forward(self, x):
        if x.numel()>self.cap: raise oom()
        x = self.lin(x[...,None].double())
        return x.transpose(1, 2) if self.over is None else x.mean(self.over)

def on_loader(dl, cap, valid=None, loss=nn.functional.cross_entropy, over=1):
    "Return a Learner that trains on the loader `dl`, with memory for `cap` tokens"
    return silence_in_double(Learner(DataLoaders(dl, valid or dl), Tokens(cap, over), loss))

data = [(torch.ones(5),torch.tensor(0)) for _ in range(50)]

def test_the_size_fits_the_longest_texts():
    """`SortedDL` begins with the longest texts

    After `apply=True`, rows of a language model's loader are still in order.
    """
    texts = [(torch.full((n,), 2),torch.tensor(i%2)) for i,n in enumerate([5]*50+[50]+[6]*50)]
    assert find_bs(on_loader(SortedDL(texts, bs=4, shuffle=True, before_batch=pad_input, num_workers=0), 1000)).size==20
    dls = [LMDataLoader([torch.arange(1000)]*20, bs=bs, seq_len=50) for bs in (4,64)]
    learn = on_loader(dls[0], 1500, dls[1], lambda p,t: nn.functional.cross_entropy(p, t%2), over=None)
    assert find_bs(learn, apply=True).size==30 and [len(o.one_batch()[0]) for o in learn.dls]==[30,30]
    x = torch.cat([b[0] for b in learn.dls.train], 1)
    assert ((x[:,1:]-x[:,:-1])%1000==1).all()

def test_streams_and_transforms_of_batches_are_supported_and_loaders_without_a_batch_size_refused():
    "A stream may end before its announced length; a transform that doubles a batch halves the size"
    class Stream(IterableDataset):
        def __iter__(self): return iter(data)
        def __len__(self): return 100   # there are only 50 samples
    for dl in (DataLoader(Stream(), bs=4, n=50),TorchLoader(Stream(), 4)):
        assert [int(find_bs(on_loader(dl, o))) for o in (60,10**6)]==[12,50]
    with pytest.raises(ValueError, match='ready-made.*batch size'):
        find_bs(on_loader(DataLoader([data[0]], bs=None), 60))
    with pytest.raises(ValueError, match='no batch'): find_bs(on_loader(DataLoader([], bs=4), 60))
    def twice(b): return torch.cat([b[0],b[0]], 1),b[1]
    assert find_bs(on_loader(DataLoader(data, bs=4, after_batch=twice), 100)).size==10

def test_apply_changes_only_the_batch_size():
    "A validation loader gets the new size only if its batches are larger"
    learn = capped(20, n=100, shuffle=True)
    learn.dls.loaders.append(DataLoader(toy_data(10), bs=8))
    loaders = list(learn.dls.loaders)
    with unchanged(learn):
        assert find_bs(learn, 'power', apply=True).size==16 and [o.bs for o in learn.dls.loaders]==[16,16,8]
        for o,bs in zip(loaders, (4,32,8)): o.bs = bs

def test_apply_keeps_the_other_arguments_of_a_loader():
    dl = WeightedDL(data, bs=4, wgts=np.arange(50.), shuffle=True, num_workers=0)
    learn,wgts = on_loader(dl, 60),dl.wgts.copy()
    assert find_bs(learn, 'power', apply=True).size==8
    assert learn.dls.train is dl and (dl.wgts==wgts).all() and dl.one_batch()[0].shape==(8,5)
    gen = torch.Generator().manual_seed(1)
    dl,state = TorchLoader(data, batch_size=4, shuffle=True, drop_last=True, generator=gen),gen.get_state()
    learn = on_loader(dl, 60, TorchLoader(data, batch_size=4))
    assert find_bs(learn, 'power', apply=True).size==8
    new = learn.dls.train
    assert (new.batch_size,new.sampler is dl.sampler,new.drop_last,new.generator is gen,len(new))==(8,True,True,True,6)
    assert gen.get_state().equal(state) and learn.dls.valid.batch_size==4

# Printing and plotting

def test_the_result_can_be_printed_and_plotted(capsys):
    "The search itself prints its progress if the Learner has a progress bar"
    res = find_bs(capped(9))
    assert capsys.readouterr()==('','')
    find_bs(capped(9).add_cb(ProgressCallback()))
    assert '16 do not fit' in capsys.readouterr().out
    assert list(range(res))==list(range(9))
    assert repr(res).startswith("9 samples fit, 10 do not\n")
    assert all((o.speed is not None and o.error is None)==o.ok for o in res.trials)
    assert res.trials[3].error=='OutOfMemoryError: planted'
    for peak in (None,2**30):   # bytes, or None on devices that do not measure the peak of memory
        for o in res.trials: o.peak = peak
        axs = res.plot()
        assert len(axs)==(1 if peak is None else 2) and ('peak MiB' in repr(res))==(peak is not None)
        for ax in axs: assert list(ax.lines[0].get_xdata())==[2,4,8,9]
    plt.close('all')
