"""Cases of models whose parameters are sharded (`fully_shard`), each beside the same on one process that is not:
launched by test_sharded.py as processes.py is by test_processes.py"""
from processes import *
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from test_precision import Scaled

def whole(o):
    "The same, with each sharded tensor as one"
    if isinstance(o, DTensor): return o.full_tensor()
    if isinstance(o, dict): return {k:whole(v) for k,v in o.items()}
    return type(o)(map(whole, o)) if isinstance(o, (list,tuple)) else o

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5,6), nn.Tanh(), nn.Linear(6,6), nn.Tanh(), nn.Linear(6,3)).double()
def mesh(replicas=1):
    if replicas==1: return init_device_mesh(device.type, (world,))
    return init_device_mesh(device.type, (replicas,world//replicas), mesh_dim_names=('replicas','shards'))
def sharded(replicas=1, net=net):
    model = net().to(device)
    for i in (0,2): fully_shard(model[i], mesh=mesh(replicas))
    return fully_shard(model, mesh=mesh(replicas))
def split(m): return [list(m[:1].parameters()),list(m[1:].parameters())]

def plain_again(learn):
    "Nobody has left anything on the model"
    assert 'forward' not in vars(learn.model)
    for o in learn.model.modules():
        if hasattr(o, 'reshard'):
            for g in o._get_fsdp_state()._fsdp_param_groups:
                assert g.reduce_grads and g.all_reduce_grads and g._partial_reduce_output is None
                assert all(getattr(getattr(p, '_unsharded_param', None), 'grad', None) is None for p in g.fsdp_params)

def weights_of(learn):
    for o in learn.model.modules():
        if hasattr(o, 'reshard'): o.reshard()
    return deepcopy(whole(learn.model.state_dict()))

def twins(ns, micro=4, macro=16, acc=None, fit=one_cycle, tokens=False, cbs=list, replicas=1, net=net, **kwargs):
    acc = acc or {}
    ds,order = toy_data(sum(ns), tokens),orders(ns)
    shares = [-(-math.ceil(macro/world)//micro)*micro]*world
    a = learner(Batches(ds, [macro_batches(o, shares, acc.get('drop_last')) for o in order], sum(shares)), ds,
        model=net, splitter=split, **kwargs)
    fit(a, cbs())
    b = learner(Batches(ds, [cut(o[rank], micro) for o in order], micro), ds, model=partial(sharded, replicas, net),
        splitter=split, **kwargs)
    fit(b, [GradientAccumulation(macro, **acc)]+cbs())
    plain_again(b)
    return a,b

def assert_same(a, b):
    for o in b.model.modules():
        if hasattr(o, 'reshard'): o.reshard()
    for f in (lambda l: l.model.state_dict(), lambda l: l.opt.state_dict()['state'],
              lambda l: [p.grad for p in l.model.parameters()], lambda l: l.recorder.lrs):
        dev = deviation(f(a), whole(f(b)))
        assert dev<1e-9, dev
    assert deviation(a.recorder.losses, b.recorder.losses)<2e-6
    same_everywhere(torch.stack(list(b.recorder.losses)).to(device))

each = [dict(sync_each=o) for o in (None,True,False)]

def case_even():
    for acc in each: assert_same(*twins(even(), acc=acc))
def case_ragged():
    for acc in each: assert_same(*twins(even(35), macro=16*world, acc=acc))
    assert_same(*twins(even(35), macro=16*world, acc=dict(drop_last=True)))
    assert_same(*twins([33,36]+even(34)[2:], macro=16*world))   # as many micro-batches, of another length at the end
def case_tokens():
    for acc in each: assert_same(*twins(even(35), macro=16*world, tokens=True, acc=acc))
def flags_seen(replicas=1, **acc):
    "In each backward pass, are gradients exchanged, and between replicas, too?"
    ds,order,seen = toy_data(35*world),orders(even(35)),[]
    class Flags(Callback):
        order,run_valid = 7,False
        def before_backward(self):
            for o in self.learn.model._get_fsdp_state()._fsdp_param_groups:
                seen.append((o.reduce_grads,o.all_reduce_grads))
    b = learner(Batches(ds, [cut(o[rank], 4) for o in order], 4), ds, model=partial(sharded, replicas), splitter=split)
    b.fit(1, 0.1, cbs=[GradientAccumulation(16*world, **acc),Flags()])
    return seen
closing = [False,False,False,True]*2+[True]
def case_when_gradients_are_exchanged():
    assert flags_seen()==flags_seen(sync_each=True)==[(True,True)]*9
    assert flags_seen(sync_each=False)==[(o,o) for o in closing]
def case_optimizers_and_clip():
    for opt_func in (Adam,partial(SGD, mom=0.9),partial(OptimWrapper, opt=torch.optim.AdamW)):
        assert_same(*twins(even(35), macro=16*world, opt_func=opt_func, cbs=lambda: [GradientClip(0.01)],
            fit=lambda l,cbs: l.fit_one_cycle(2, 0.01, wd=0.1, cbs=cbs)))
def case_loss_scaling():
    "A GradScaler that really scales; gradients that overflow in one process's shard skip the step on all"
    def scaled(): return [Scaled(init_scale=2.**10, growth_interval=3),GradientClip(0.05)]
    for acc in each: assert_same(*twins(even(35), macro=16*world, acc=acc, cbs=scaled))
    seen,fp16 = [],Scaled(init_scale=1024.)
    class Overflow(Callback):
        order,run_valid = 8,False   # before the scaler looks
        def before_step(self):
            g = next(self.learn.model.parameters()).grad.to_local()
            if rank==world-1 and self.epoch==0: g[0] = float('inf')
    class Look(Callback):
        order,run_valid = 60,False
        def after_batch(self):
            if self.gradient_accumulation.stepped:
                seen.append((self.learn.scaler.get_scale(),torch.cat([whole(p.detach()).flatten() for p in
                    self.learn.model.parameters()])))
    ds,order = toy_data(35*world),orders(even(35))
    b = learner(Batches(ds, [cut(o[rank], 4) for o in order], 4), ds, model=sharded, splitter=split)
    first = deepcopy(weights_of(b))
    b.fit(2, 0.1, cbs=[GradientAccumulation(16*world),fp16,Overflow(),Look()])
    scales = torch.tensor([o for o,_ in seen], dtype=torch.float64)
    same_everywhere(scales)
    assert scales.tolist()==[512.,256.]+[128.]*4, scales
    ws = [o for _,o in seen]
    assert torch.equal(ws[0], torch.cat([o.flatten() for o in first.values()])) and torch.equal(ws[0], ws[1])
    assert not torch.equal(ws[-1], ws[0]) and ws[-1].isfinite().all()
def case_several_fits():
    "Validation leaves parameters gathered; a part is frozen, an epoch is skipped"
    def fit(l, cbs):
        l.freeze()
        l.fit(1, 0.05, cbs=cbs)
        l.validate()
        l.unfreeze()
        l.fit_one_cycle(2, 0.05, cbs=cbs)
        l.fit_one_cycle(2, 0.05, cbs=cbs, start_epoch=1)
    for acc in each: assert_same(*twins(even(35), macro=16*world, fit=fit, acc=acc))
def case_short_epochs():
    "All end their epochs early, in the middle of a macro-batch, and gradients may still wait"
    for acc in each:
        ns = even(35)
        ds,order = toy_data(sum(ns)),orders(ns)
        a = learner(Batches(ds, [macro_batches([p[:28] for p in o], [16]*world, False) for o in order], 16*world), ds,
            model=net, splitter=split)
        a.fit(2, 0.1)
        b = learner(Batches(ds, [cut(o[rank], 4) for o in order], 4), ds, model=sharded, splitter=split)
        b.fit(2, 0.1, cbs=[GradientAccumulation(16*world, **acc),ShortEpochCallback(0.6)])
        plain_again(b)
        dev = deviation(a.model.state_dict(), whole(b.model.state_dict()))
        assert dev<1e-12, dev
def case_interrupted_fit_leaves_nothing():
    "Not even gradients that wait"
    for acc in each:
        for event,exc in (('after_batch',KeyboardInterrupt), ('after_pred',CancelFitException),
                ('after_loss',RuntimeError)):
            ns = even(35)
            ds,order = toy_data(sum(ns)),orders(ns)
            a,b = (learner(Batches(ds, [cut(o[rank], 4) for o in order], 4), ds, model=sharded, splitter=split)
                for _ in range(2))
            try: b.fit(1, 0., cbs=[GradientAccumulation(32*world, **acc),Raise(event, exc, 7, at=2)])
            except (KeyboardInterrupt,RuntimeError): pass
            b.dls.train.epoch = 0
            for o in (a,b): o.fit(1, 0.1, cbs=GradientAccumulation(32*world, **acc))
            plain_again(b)
            assert deviation(whole(a.model.state_dict()), whole(b.model.state_dict()))<1e-12

def case_lr_find():
    def fit(l, cbs):
        before = weights_of(l)
        for cb in cbs or [Rehearse()]: l.add_cb(cb)
        l.found = l.lr_find(num_it=20, show_plot=False).valley
        assert deviation(before, weights_of(l))==0
        l.dls.train.epoch = 0
        l.fit(1, 0.05)
    a,b = twins(even(35), macro=16*world, fit=fit)
    assert math.isclose(a.found, b.found, rel_tol=1e-9)
    assert_same(a, b)

# What cannot be

def raises(text, f):
    try: f()
    except (ValueError,RuntimeError) as e: assert text in str(e), e
    else: raise AssertionError(f'{text!r} was not refused')
def fit_one(ns=None, cbs=(), made=None, **acc):
    ns = ns or even(35)
    ds,order = toy_data(sum(ns)),orders(ns)
    b = learner(Batches(ds, [cut(o[rank], 4) for o in order], 4), ds, model=sharded, splitter=split)
    if made: made(b)
    b.fit(1, 0.1, cbs=[GradientAccumulation(16*world, **acc),*cbs])
def case_refused():
    raises('sharded parameters (FSDP) need the same on each', lambda: fit_one([35,20]+even(35)[2:]))
    def late(l):
        l.model = net()
        l.create_opt()
        l.model = sharded()
    raises('the optimizer has none of the sharded parameters', lambda: fit_one(made=late))
    class Old(nn.Sequential): pass
    Old.__name__ = 'FullyShardedDataParallel'
    def fsdp1(l): l.model = Old(net())
    raises('sharded over processes (FSDP)', lambda: fit_one(made=fsdp1))
    def half(l):
        l.model,l.opt = sharded(net=lambda: net().bfloat16()),None
    raises('Leave the parameters in float32', lambda: fit_one(made=half))
def case_one_ends_early():
    "An error that says so, on all processes"
    for event,exc,text in (('after_batch',CancelTrainException,'1 has ended its epoch'),
            ('after_batch',CancelFitException,'1 has ended its fit'),
            ('before_batch',CancelBatchException,'1 leaves a micro'),
            ('after_loss',CancelBatchException,'1 leaves a micro')):
        for drop_last in (True,False):
            raises(text, lambda: fit_one(cbs=[OnOne(event, exc, [4])], drop_last=drop_last))

# On four processes

def case_replicas():
    assert flags_seen(2)==[(True,o) for o in closing]
    assert flags_seen(2, sync_each=True)==[(True,True)]*9
    assert flags_seen(2, sync_each=False)==[(o,o) for o in closing]
    for acc in each:
        assert_same(*twins(even(35), macro=16*world, tokens=True, replicas=2, acc=acc))
        assert_same(*twins(even(35), macro=16*world, replicas=2, acc=acc, cbs=lambda: [GradientClip(0.01)],
            fit=lambda l,cbs: [l.fit(1, 0.1, cbs=cbs) for _ in range(2)]))

mine = cases_of({k:v for k,v in globals().items() if getattr(v, '__module__', '')==__name__})

if __name__=='__main__': main(*sys.argv[1:], cases=mine)
