"""Memory that runs out on some of several processes (`micro_batch_size='auto'`), each case beside the same on one
process where it does not: launched by test_auto_processes.py as processes.py is by test_processes.py"""
from common import InBackward
from processes import *
from test_precision import Scaled

class Plan:
    "Where memory runs out: at which stage, on which processes, in which batch, and above how many samples"
    learn,stage,ranks,at,limit,failed = None,None,(),None,2,0
    def set(self, stage, ranks, at=None, limit=2):
        self.stage,self.ranks,self.at,self.limit,self.failed = stage,ranks,at,limit,0
    def check(self, stage, n):
        learn = self.learn
        if stage!=self.stage or rank not in self.ranks or not isinstance(learn.model, DDP): return
        if learn.training==(stage=='valid') or self.at not in (None,(learn.epoch,learn.iter)): return
        limit = self.limit[rank] if isinstance(self.limit, list) else self.limit
        if n>limit:
            self.failed += 1
            raise torch.OutOfMemoryError('planted')
plan = Plan()

class Brittle(nn.Module):
    "Remembers how many samples it was trained on"
    def __init__(self):
        super().__init__()
        self.register_buffer('seen', torch.zeros((), dtype=torch.int64))
    def forward(self, x):
        if self.training: self.seen += len(x)
        plan.check('forward' if self.training else 'valid', len(x))
        return InBackward.apply(x, lambda n: plan.check('backward', n))   # above, gradients are there
class Loss(CrossEntropy):
    def __call__(self, pred, *y):
        plan.check('loss', len(pred))
        return super().__call__(pred, *y)
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5,6), nn.Tanh(), Brittle(), nn.Linear(6,3)).double()
def step_fails(learn):
    "The first step moves the weights, and then memory runs out"
    stock,learn.opt = learn.opt_func,None
    def opt_func(*args, **kwargs):
        opt = stock(*args, **kwargs)
        step,done = opt.step,[]
        def failing(*a, **kw):
            step(*a, **kw)
            if plan.stage=='step' and rank in plan.ranks and isinstance(learn.model, DDP) and not done:
                done.append(1)
                plan.failed += 1
                raise torch.OutOfMemoryError('planted')
        opt.step = failing
        return opt
    learn.opt_func = opt_func
def setup(learn):
    plan.learn = learn
    step_fails(learn)

def run(ns=None, micro=8, macro=None, acc=None, fails=True, **kwargs):
    args = dict(model=net, loss_func=Loss(), setup=setup)|kwargs
    a,b = twins(ns or even(35), micro, macro or 16*world, dict(micro_batch_size='auto')|(acc or {}), **args)
    if fails is not None: assert (plan.failed>0)==(rank in plan.ranks and fails), (plan.failed, plan.stage, plan.ranks)
    check(a, b)
    return a,b
def check(a, b):
    "As `assert_twins`; the buffer is the first process's on all"
    seen = b.model.module[2].seen
    if b.model.broadcast_buffers: same_everywhere(seen[None])
    seen.copy_(a.model[2].seen)
    assert_twins(a, b)

def case_nothing_fails():
    plan.set(None, ())
    for drop_last in (True,False): run(acc=dict(drop_last=drop_last))
def case_each_stage_on_each_process_in_each_batch():
    ns,a = even(35),None
    ds,order = toy_data(sum(ns)),orders(ns)
    places = [(0,i) for i in range(5)]+[(1,3)]   # the second, the fourth and the fifth batch close a macro-batch
    for i,stage in enumerate(('forward','loss','backward')):
        for r in range(world):
            for at in [places[(i+2*r+k)%6] for k in (0,3)[:4-world]]:
                plan.set(stage, (r,), at)
                if a is None: a,_ = run(ns, opt_func=Adam)
                else:
                    b = together(Batches(ds, [cut(o[rank], 8) for o in order], 8), ds,
                        GradientAccumulation(16*world, micro_batch_size='auto'), one_cycle, setup=setup, model=net,
                        loss_func=Loss(), opt_func=Adam)
                    assert (plan.failed>0)==(rank==r)
                    assert set(b.exchanges.buckets.values())=={1} and b.exchanges.last==6
                    check(a, b)
def case_the_first_step():
    for ranks in [(r,) for r in range(world)]+[tuple(range(world))]:
        plan.set('step', ranks)
        run(opt_func=Adam)
def case_several_at_once():
    "Each has as much memory as it has"
    for stage in ('forward','loss','backward'):
        plan.set(stage, tuple(range(world)), None, [1,3,5][:world])
        run(acc=dict(drop_last=stage=='loss'))
        plan.set(stage, tuple(range(1, world)), None, 1)
        run(uneven())
def case_tokens():
    for stage in ('forward','backward'):
        for r in range(world):
            plan.set(stage, (r,))
            run(uneven() if r else even(35), tokens=True, acc=dict(drop_last=stage=='forward'))
def case_loaders_of_their_own():
    "Other micro-batches, hardly any samples, a batch of a single sample"
    for ns,micro in (([40,5,1][:world],8), ([40,33,17][:world],[8,16,4][:world])):
        plan.set('backward', (0,))
        run(ns, micro)
def case_ways_to_wrap():
    for ddp in (dict(bucket_cap_mb=1e-4), dict(find_unused_parameters=True),
            dict(broadcast_buffers=False)):
        plan.set('forward' if 'broadcast_buffers' in ddp else 'backward', (world-1,))
        run(ddp=ddp)
    plan.set('backward', (world-1,))
    run(ddp=dict(gradient_as_bucket_view=True), opt_func=partial(OptimWrapper, opt=torch.optim.AdamW))
def case_what_nobody_uses_stays_as_it_is():
    "Weight decay does not touch it"
    def model():
        m = net()
        m[2].unused = nn.Linear(2, 2).double()
        return m
    plan.set('backward', (0,))
    a,b = run(model=model, ddp=dict(find_unused_parameters=True), fit=lambda l,cbs: l.fit(2, 0.1, wd=0.1, cbs=cbs),
        splitter=lambda m: [list(m.parameters())])
    assert b.model.module[2].unused.weight.grad is None
def case_validation():
    "Metrics gather as often as they would"
    for ranks in ((0,),(world-1,)):
        plan.set('valid', ranks, None, 5)
        run(metrics=accuracy, splitter=splitter)
def case_scaled_and_clipped():
    "With a GradScaler"
    for stage in ('forward','backward'):
        plan.set(stage, (world-1,))
        run(cbs=lambda: [Scaled(init_scale=2.**10, growth_interval=3),GradientClip(0.05)])
def case_several_fits():
    "The second knows the size; `lr_find` finds the same"
    def fit(l, cbs):
        for cb in cbs or [Rehearse()]: l.add_cb(cb)
        l.fit(1, 0.05)
        l.found = l.lr_find(num_it=20, show_plot=False).valley
        l.dls.train.epoch = 0
        l.fit(2, 0.05)
    plan.set('backward', (world-1,), (0,3))
    a,b = run(fit=fit, each=True)
    assert math.isclose(a.found, b.found, rel_tol=1e-9)
def case_half_precision():
    "The sums are in float32, and rounded once"
    assert half_precision(even(64), 8, 64*world, micro_batch_size='auto')<=1
def case_one_ends_early():
    "Its epoch: it steps with the others. Its fit: an error on all"
    on_one('after_batch', CancelTrainException, [4], lambda i: i<5, micro_batch_size='auto')
    on_one('after_loss', CancelBatchException, [2], lambda i: i!=2, micro_batch_size='auto', drop_last=False)
    fails_on_all('1 of', 'after_batch', CancelFitException, [4], micro_batch_size='auto')
    fails_on_all('1 of', 'after_batch', CancelFitException, [3], micro_batch_size='auto')
def case_schedule():
    for acc in (lambda: GradientAccumulationSchedule(8*world, 24*world, micro_batch_size='auto'),
                lambda: GradientAccumulationScheduler({1:3}, micro_batch_size='auto')):
        ds,order,learns = toy_data(48*world),orders(even(48)),[]
        for stage in (None,'backward'):
            plan.set(stage, (0,), (0,2))
            learns.append(together(Batches(ds, [cut(o[rank], 8) for o in order], 8), ds, acc(), one_cycle, model=net,
                loss_func=Loss(), setup=setup))
        for l in learns: l.model.module[2].seen.zero_()
        assert_twins(*learns)
def case_refused():
    "What is exchanged with every micro-batch, before a weight moves; and not the same on all"
    def fit(acc=None, setup=lambda l: None, mine=True, **kwargs):
        ds,order = toy_data(35*world),orders(even(35))
        learn = learner(Batches(ds, [cut(o[rank], 8) for o in order], 8), ds, **kwargs)
        learn.model = DDP(learn.model)
        setup(learn)
        before = weights(learn)
        cb = GradientAccumulation(16*world, micro_batch_size='auto' if mine else None, **(acc or {}))
        try: learn.fit(1, 0.1, cbs=cb)
        except ValueError as e:
            assert torch.equal(weights(learn), before)
            return str(e)
    assert 'training metrics' in fit(setup=train_metrics, metrics=accuracy)
    assert '`sync_each=True`' in fit(dict(sync_each=True))
    assert '`log_accum_batch=False`' in fit(dict(log_accum_batch=False))
    assert "`'auto'` is" in fit(mine=rank==0)
    def sync(l): l.model.module.norm = nn.SyncBatchNorm(3)
    assert 'SyncBatchNorm' in fit(setup=sync)
    def second(l): l.model = nn.Sequential(l.model, DDP(nn.Linear(3, 3).double()))
    assert 'more than one DistributedDataParallel' in fit(setup=second, splitter=lambda m: [list(m.parameters())])

def late(text, fail):
    "One process fails for good; the others raise PyTorch's error when their exchange has taken too long"
    ds,order = toy_data(35*world),orders(even(35))
    learn = learner(Batches(ds, [cut(o[rank], 8) for o in order], 8), ds, model=net, loss_func=Loss())
    learn.model = DDP(learn.model, process_group=dist.new_group(timeout=timedelta(seconds=8)))
    setup(learn)
    start = time.time()
    try: learn.fit(1, 0.1, cbs=[GradientAccumulation(16*world, micro_batch_size='auto'),*fail()])
    except (RuntimeError,KeyboardInterrupt) as e: said = str(e)
    else: raise AssertionError('no error')
    assert (text in said)==(rank==0), said
    assert time.time()-start<60
    dist.barrier()
def case_one_fails_for_good():
    "It tells what, and nobody waits longer than the timeout"
    plan.set('forward', (0,), None, 0)
    late('a micro-batch of a single sample does not fit', list)
    plan.set(None, ())
    for exc in (RuntimeError,KeyboardInterrupt):
        late('planted', lambda: [Raise('after_pred', exc, 5, at=2)] if rank==0 else [])

mine = cases_of({k:v for k,v in globals().items() if getattr(v, '__module__', '')==__name__})

if __name__=='__main__': main(*sys.argv[1:], cases=mine)
