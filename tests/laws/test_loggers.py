"""Loggers, progress bars and plots show the figures of the full-batch run."""
import pytest, sys, time
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from torch import nn
from fastai.vision.all import CSVLogger, Callback, ProgressCallback, ShowGraphCallback, accuracy
from fastaccum import GradientAccumulation, GradientAccumulationSchedule, NoiseScale
from fastaccum.testing import deviation, toy
from common import BatchSizesLoader, RaiseAt, learnable_data, weights_unchanged
from test_applications import in_double, linear, vision
from test_split import accumulating

# A watcher takes a Learner, and returns two functions: one makes callbacks that log a fit, the other
# reads the figures that they have shown

def plots(learn):
    import matplotlib.pyplot as plt
    def lines(plot, **kwargs):
        plt.close('all')
        plot(**kwargs)
        return [line.get_xydata() for ax in plt.gcf().axes for line in ax.get_lines()]
    rec = learn.recorder
    return list,lambda: dict(loss=lines(rec.plot_loss, skip_start=0), sched=lines(rec.plot_sched))

class Table(ProgressCallback):
    "A progress bar and table that notes its rows, and the loss beside the bar, in the dict `shown`"
    name = 'progress'
    def __init__(self, shown): self.shown = shown
    def _write_stats(self, log):
        if isinstance(log[-1], str): self.rows = self.shown.setdefault(','.join(log), [])
        else: self.rows.append([*log])
        super()._write_stats(log)
    def after_train(self):
        assert self.pbar.comment==f'{self.smooth_loss.item():.4f}'
        self.shown.setdefault('bar', []).append(self.smooth_loss.item())
        super().after_train()

def table(learn):
    shown,learn.recorder.add_time,learn.logger = {},False,print
    return lambda: [Table(shown)],lambda: shown

def graph(learn):
    shown = []
    learn.progress = SimpleNamespace(mbar=SimpleNamespace(update_graph=lambda *args: shown.append(args)))
    return lambda: [ShowGraphCallback()],lambda: dict(graph=shown)

def csv(learn):
    learn.recorder.add_time = False
    def read():
        header,*lines = (learn.path/'history.csv').read_text().splitlines()
        return {header:[[float(v) for v in o.split(',')] for o in lines if o!=header]}
    return lambda: [CSVLogger(append=True)],read

def tensorboard(learn):
    pytest.importorskip('tensorboard')
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from fastai.callback.tensorboard import TensorBoardCallback
    def read():
        events = EventAccumulator(str(learn.path), purge_orphaned_data=False).Reload()
        # sorted, because files are read in the order of their names
        def of(k): return sorted(events.Scalars(k), key=lambda o: o.wall_time)
        return {k:[(o.step,o.value) for o in of(k)] for k in events.Tags()['scalars']}
    return lambda: [TensorBoardCallback(learn.path, trace_model=False, log_preds=False)],read

def end_wandb_run():
    "End the W&B run; return its rows, and a dict with the horizontal axis of each metric"
    import wandb
    from fastaccum.wandb import offline_records, offline_rows
    file = Path(wandb.run.settings.sync_file)
    wandb.run.finish()
    wandb.teardown()   # completes the file, which `finish` does not always do
    axes = {o.metric.name:o.metric.step_metric for o in offline_records(file) if o.HasField('metric')}
    return [o for o in offline_rows(file) if 'raw_loss' in o],axes

@pytest.fixture(autouse=True)
def no_wandb_run_is_left():
    yield
    if 'wandb' in sys.modules and sys.modules['wandb'].run: end_wandb_run()

def wandb(learn, stock=False, log_preds=False, **kwargs):
    wandb = pytest.importorskip('wandb')
    from fastai.callback.wandb import WandbCallback as Stock
    from fastaccum.wandb import WandbCallback
    settings = wandb.Settings(silent=True, console='off', x_disable_stats=True)
    wandb.init(mode='offline', dir=str(learn.path), settings=settings)
    # fastai 2.8.10 to 2.8.12 fails to format the arguments (#4173)
    if stock: vars(learn)['gather_args'] = dict
    def read():
        rows = end_wandb_run()[0]
        names = {k for o in rows for k in o}-{'_timestamp','_runtime','train_samples_per_sec'}
        return {k:[(o['_step'],o[k]) for o in rows if k in o] for k in names}
    return lambda: [(Stock if stock else WandbCallback)(log_preds=log_preds, **kwargs)],read

def stock_wandb(learn): return wandb(learn, stock=True)

watchers = [plots,table,graph,csv,tensorboard,wandb,stock_wandb]

def learner(d, n=60):
    d.mkdir()
    return toy(8, n=n, metrics=accuracy, path=d)

def assert_shown_alike(a, b):
    assert a.keys()==b.keys() and a and all(map(len, a.values()))
    for k in a: assert deviation(a[k], b[k])<2e-6, k

def watched(watch, d, make_acc, big=False):
    """Fit, run `lr_find`, interrupt a fit, and fit again, with callbacks that log

    Return the figures that were shown, and for each step the recorded `accum_bs` and the planned number
    of samples. With `big=True`, the loader has batches of the planned sizes, and the fits do not
    accumulate.
    """
    learn = learner(d, n=125)
    (listen,read),dls,dl = watch(learn),learn.dls,learn.dls.train
    def run(n_epoch, fit, acc=None, stop=None):
        acc = acc or make_acc()
        dls.loaders[0] = dl
        sizes = acc.plan(dls, n_epoch).sizes
        if big: dls.loaders[0] = BatchSizesLoader(dl, sizes)
        with learn.added_cbs(([] if big else [acc])+listen()): fit()
        return getattr(learn.recorder, 'accum_bs', [])[:stop],[n for o in sizes for n in o][:stop]
    def interrupted():
        interrupt = RaiseAt('before_step', KeyboardInterrupt, 0, skip=2)
        with pytest.raises(KeyboardInterrupt): learn.fit(1, 0.01, cbs=interrupt)
        for cb in learn.cbs:
            # makes TensorBoard write the remaining events now
            if 'writer' in vars(cb): cb.writer.close()
        learn.opt.zero_grad()   # fastai leaves gradients when a fit is interrupted
    two = run(2, lambda: learn.fit_one_cycle(2, 0.05))
    run(1, lambda: learn.lr_find(num_it=10, show_plot=False), GradientAccumulation(two[1][0]))
    # W&B writes a row only when the next row comes, so in W&B the interrupted fit has one step less
    fits = [two, run(1, interrupted, stop=2-('wandb' in watch.__name__)), run(1, lambda: learn.fit(1, 0.01))]
    return read(),*(sum(o, []) for o in zip(*fits))

@pytest.mark.parametrize('acc', [lambda: GradientAccumulation(32),
    lambda: GradientAccumulationSchedule(16, 64, finish=0.5)], ids=['constant','scheduled'])
@pytest.mark.parametrize('watch', watchers)
def test_the_figures_shown_are_those_of_the_full_batch_run(watch, acc, tmp_path):
    "W&B and TensorBoard also log step sizes that change, and W&B logs the samples of all fits so far"
    (a,*_),(b,accum_bs,n_samples) = (watched(watch, tmp_path/str(big), acc, big) for big in (True,False))
    sizes,samples = (b.pop(k, []) for k in ('accumulation_batch_size','samples'))
    changes = len({*accum_bs})>1 and watch in (tensorboard,wandb,stock_wandb)
    assert [v for _,v in sizes]==(accum_bs if changes else [])
    assert [v for _,v in samples]==([*accumulate(n_samples)] if watch in (wandb,stock_wandb) else [])
    for rows in filter(None, (sizes,samples)): assert {x for x,_ in rows}=={x for x,_ in a['lr_0']}
    assert_shown_alike(a, b)

@pytest.mark.parametrize('watch', watchers)
def test_with_log_accum_batch_off_micro_batches_are_shown_as_batches(watch, tmp_path):
    "With a learning rate of 0, the run on micro-batches and the plain run have the same losses"
    def shown(nm, cbs):
        learn = learner(tmp_path/nm)
        listen,read = watch(learn)
        learn.fit_one_cycle(2, 0., wd=0., moms=(0.9,)*3, cbs=cbs+listen())
        return read()
    assert_shown_alike(shown('a', []), shown('b', [GradientAccumulation(32, log_accum_batch=False)]))

class Clock(Callback):
    "A clock by which micro-batches take 1, 2, 3, 4, 1, 2, … seconds"
    run_valid,now,n = False,0.,0
    def after_backward(self): self.now,self.n = self.now+1+self.n%4,self.n+1

def test_wandb_plots_over_samples_and_measures_the_time_of_whole_steps(tmp_path, monkeypatch):
    learn,clock = learner(tmp_path/'a'),Clock()
    listen,_ = wandb(learn)
    with monkeypatch.context() as m:
        m.setattr(time, 'perf_counter', lambda: clock.now)
        learn.fit(1, 0.05, cbs=[GradientAccumulation(32),clock]+listen())
    rows,axes = end_wandb_run()
    assert deviation([o['train_samples_per_sec'] for o in rows], [32/10,28/10])<1e-6
    assert axes=={'samples':'', **dict.fromkeys(['raw_loss','train_loss','valid_loss','accuracy'], 'samples')}

def test_wandb_refuses_to_log_a_model_that_is_not_saved(tmp_path):
    learn = learner(tmp_path/'a')
    listen,_ = wandb(learn, log_model=True)
    with weights_unchanged(learn), pytest.raises(ValueError, match='SaveModelCallback'):
        learn.fit(1, 0.05, cbs=listen())

def test_wandb_shows_predictions_at_steps(tmp_path, monkeypatch):
    def net(pretrained): return nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.AdaptiveAvgPool2d(1))
    learn,seen = in_double(vision(4, net, custom_head=linear(8), path=tmp_path)),[]
    listen,_ = wandb(learn, log_preds=True, log_preds_every_epoch=True)
    # the rows of an offline run have no tables, so note the calls of `log`
    log = sys.modules['wandb'].log
    monkeypatch.setattr('wandb.log',
        lambda o, **kw: seen.append(kw['step']) if 'Prediction_Samples' in o else log(o, **kw))
    learn.fit(2, 0.05, cbs=[GradientAccumulation(16),*listen()])
    assert seen==[1,3] and len(learn.recorder.losses)==4

def test_tensorboard_gets_noise_scale_and_micro_batch_size_of_each_step(tmp_path):
    "Memory holds 2 samples, so 'auto' splits batches of 4 into micro-batches of 2"
    learn = toy(4, data=learnable_data(64), path=tmp_path, cbs=[*accumulating(16, ('auto',2)), NoiseScale(every=2)])
    listen,read = tensorboard(learn)
    learn.fit(1, .1, cbs=listen())
    scales,sizes = ([v for _,v in read()[k]] for k in ('noise_scale','micro_batch_size'))
    assert deviation(scales, learn.recorder.noise_scale)<1e-6 and sizes==[2.]*4
