"""What people watch is the full-batch run: W&B, TensorBoard, CSV, the progress bar, ShowGraph and fastai's plots."""
import pytest, sys, time
from itertools import accumulate
from pathlib import Path
from torch.amp import autocast
from fastai.callback.core import Callback
from fastai.callback.progress import CSVLogger, ProgressCallback, ShowGraphCallback
from fastai.callback.tracker import SaveModelCallback
from fastai.metrics import accuracy
from fastaccum import GradientAccumulation, GradientAccumulationSchedule
from fastaccum.testing import deviation, toy
from common import CpuMixedPrecision, Raise, weights
from test_applications import linear, quiet, smooth, vision

# Each watcher is given a Learner and a folder. It returns a function that makes callbacks, and one that reads what was
# shown: by name of a column, or header of a table, a list of rows

def plots(learn, d):
    import matplotlib.pyplot as plt
    def read():
        shown = {}
        for nm,kwargs in (('plot_loss',dict(skip_start=0)), ('plot_sched',{})):
            plt.close('all')
            getattr(learn.recorder, nm)(**kwargs)
            shown[nm] = [line.get_xydata() for ax in plt.gcf().axes for line in ax.get_lines()]
        plt.close('all')
        return shown
    return list,read

class Table(ProgressCallback):
    name = 'progress'
    def __init__(self, shown): self.shown = shown
    def _write_stats(self, log):
        if isinstance(log[-1], str): self.header = self.shown.setdefault(','.join(log), [])
        else: self.header.append([*log])
        super()._write_stats(log)
    def after_train(self):
        assert self.pbar.comment==f'{self.smooth_loss.item():.4f}'
        self.shown.setdefault('bar', []).append([self.smooth_loss.item()])
        super().after_train()

def table(learn, d):
    shown,learn.recorder.add_time,learn.logger = {},False,print
    return lambda: [Table(shown)],lambda: shown

def graph(learn, d):
    shown = []
    class Bar:
        def update_graph(self, *args): shown.append(args)
    class Progress(Callback):
        def before_fit(self): self.mbar = Bar()
    return lambda: [Progress(),ShowGraphCallback()],lambda: dict(graph=shown)

def csv(learn, d):
    learn.recorder.add_time = False
    def read():
        lines = (d/'history.csv').read_text().splitlines()
        return {lines[0]:[[float(v) for v in o.split(',')] for o in lines if o!=lines[0]]}
    return lambda: [CSVLogger(append=True)],read

def tensorboard(learn, d, **kwargs):
    pytest.importorskip('tensorboard')
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from fastai.callback.tensorboard import TensorBoardCallback
    def read():
        events = EventAccumulator(str(d)).Reload()
        return {k:[(o.step,o.value) for o in events.Scalars(k)] for k in events.Tags()['scalars']}
    return lambda: [TensorBoardCallback(d, **{'trace_model':False, 'log_preds':False, **kwargs})],read

def offline(d):
    "Start an offline run of W&B"
    wandb = pytest.importorskip('wandb')
    from fastai.callback.wandb import WandbCallback
    WandbCallback._wandb_watch_called = False
    return wandb.init(mode='offline', dir=str(d), settings=wandb.Settings(silent=True, console='off', x_disable_stats=True))

def ended(run):
    "End it, and read its rows and the axis of each of its metrics"
    import wandb
    from fastaccum.wandb import offline_records, offline_rows
    file = Path(run.settings.sync_file)
    run.finish()
    wandb.teardown()   # after `finish` alone the file is not always complete
    axes = {o.metric.name:o.metric.step_metric for o in offline_records(file) if o.HasField('metric')}
    return offline_rows(file),axes

@pytest.fixture(autouse=True)
def none_runs():
    yield
    if 'wandb' in sys.modules and sys.modules['wandb'].run: ended(sys.modules['wandb'].run)

def wandb(learn, d, stock=False, **kwargs):
    run = offline(d)
    from fastai.callback.wandb import WandbCallback as Stock
    from fastaccum.wandb import WandbCallback
    if stock: vars(learn)['gather_args'] = dict   # fastai #4173: 2.8.10 to 2.8.12 raise while they format these
    def read():
        rows = [o for o in ended(run)[0] if 'raw_loss' in o]
        assert all(o.pop('train_samples_per_sec')>0 for o in rows)
        return {k:[(o['_step'],o[k]) for o in rows if k in o] for o in rows for k in o if k not in ('_timestamp','_runtime')}
    return lambda: [(Stock if stock else WandbCallback)(**{'log_preds':False, **kwargs})],read

def stock_wandb(learn, d): return wandb(learn, d, stock=True)

watchers = [plots,table,graph,csv,tensorboard,wandb,stock_wandb]

# A fit, `lr_find`, and another fit, on 125 samples

class Scaled(CpuMixedPrecision):
    "The GradScaler without the half precision, so that runs can be compared to the last digit"
    def before_fit(self):
        super().before_fit()
        self.autocast = autocast('cpu', enabled=False)

class Batches:
    "The batches of a loader, but of the given sizes, which are listed by epoch"
    def __init__(self, dl, sizes): self.dl,self.sizes,self.epoch,self.device = dl,sizes,0,dl.device
    def __len__(self): return len(self.sizes[min(self.epoch, len(self.sizes)-1)])
    def __iter__(self):
        idxs,sizes = iter(self.dl.get_idxs()),self.sizes[min(self.epoch, len(self.sizes)-1)]
        self.epoch += 1
        for n in sizes: yield self.dl.create_batch([self.dl.dataset[next(idxs)] for _ in range(n)])

def constant(): return GradientAccumulation(32)
def scheduled(): return GradientAccumulationSchedule(16, 64, finish=0.5)
cases = dict(constant=(constant,list), scheduled=(scheduled,list),
    scaled=(constant,lambda: [Scaled(init_scale=2.**10, growth_interval=3)]))

def watched(watch, d, case, big=False):
    "What was shown, and what is known of the steps: their sizes, wanted and real"
    d.mkdir()
    learn = toy(8, n=125, metrics=accuracy, path=d)
    (make_acc,precision),dls,dl = cases[case],learn.dls,learn.dls.train
    listen,read = watch(learn, d)
    wanted,real = [],[]
    def run(n_epoch, fit, acc):
        sizes = acc.plan(toy(8, n=125).dls, n_epoch).sizes
        if big: dls.loaders[0] = Batches(dl, sizes)
        with learn.added_cbs(([] if big else [acc])+precision()+listen()): fit()
        return [n for o in sizes for n in o]
    real += run(2, lambda: learn.fit_one_cycle(2, 0.05), make_acc())
    wanted += getattr(learn.recorder, 'accum_bs', [])
    run(1, lambda: learn.lr_find(num_it=10, show_plot=False), GradientAccumulation(real[0]))
    real += run(1, lambda: learn.fit(1, 0.01), make_acc())
    return read(),wanted+getattr(learn.recorder, 'accum_bs', []),real

@pytest.mark.parametrize('case', cases)
@pytest.mark.parametrize('watch', watchers)
def test_what_is_shown_is_the_full_batch_runs(watch, case, tmp_path):
    "Besides, W&B and TensorBoard are told sizes that change, and W&B how many samples all fits have seen"
    (a,*_),(b,wanted,real) = (watched(watch, tmp_path/str(big), case, big) for big in (True,False))
    sizes,samples = ([v for _,v in b.pop(k, [])] for k in ('accumulation_batch_size','samples'))
    assert sizes==(wanted if case=='scheduled' and watch in (tensorboard,wandb,stock_wandb) else [])
    assert samples==([*accumulate(real)] if watch in (wandb,stock_wandb) else []) and sum(real)==3*125
    assert_shown_alike(a, b)

def learner(d):
    d.mkdir()
    return toy(8, n=60, metrics=accuracy, path=d)

def assert_shown_alike(a, b):
    assert a.keys()==b.keys() and a and all(map(len, a.values()))
    for k in a: assert deviation(a[k], b[k])<2e-6, k

@pytest.mark.parametrize('watch', watchers)
def test_micro_batches_are_shown_as_fastai_shows_batches(watch, tmp_path):
    "With `log_accum_batch=False`. No weight moves, so that both runs show the same losses"
    def shown(nm, cbs):
        learn = learner(tmp_path/nm)
        listen,read = watch(learn, learn.path)
        learn.fit_one_cycle(2, 0., wd=0., moms=(0.9,)*3, cbs=cbs+listen())
        return read()
    assert_shown_alike(shown('a', []), shown('b', [GradientAccumulation(32, log_accum_batch=False)]))

# after an interrupt, fastai's `CSVLogger` calls itself in the next fit
interrupts = [(o,event) for o in (plots,table,graph,tensorboard,wandb) for event in ('before_batch','after_batch')]

@pytest.mark.parametrize('watch,event', [(o,None) for o in watchers]+interrupts)
def test_a_plain_fit_afterwards_is_shown_as_ever(watch, event, tmp_path):
    "After a fit with accumulation, in which no weight moves, and which may be interrupted"
    def shown(nm, cbs):
        learn = learner(tmp_path/nm)
        listen,read = watch(learn, learn.path)
        learn.add_cbs(listen())
        if cbs:
            try: learn.fit(1, 0., cbs=cbs+([Raise(event, KeyboardInterrupt, 70, at=2)] if event else []))
            except KeyboardInterrupt: pass
        learn.fit_one_cycle(2, 0.05, reset_opt=True)
        rows = read()
        if watch not in (wandb,stock_wandb): return rows
        # these count steps, epochs and samples through all fits
        return {k:[v for _,v in o] for k,o in rows.items() if k not in ('_step','epoch','samples')}
    a,b = shown('a', []),shown('b', [GradientAccumulation(32)])
    assert_shown_alike(a, {k:o[-len(a[k]):] for k,o in b.items()})

# Weights & Biases

def test_without_accumulation_its_callback_is_fastais(tmp_path):
    def shown(watch):
        learn = learner(tmp_path/watch.__name__)
        listen,read = watch(learn, learn.path)
        learn.fit_one_cycle(2, 0.05, cbs=listen())
        return read()
    assert_shown_alike(shown(stock_wandb), shown(wandb))

def test_losses_and_metrics_are_drawn_over_samples(tmp_path):
    learn = learner(tmp_path/'a')
    listen,_ = wandb(learn, learn.path)
    run = sys.modules['wandb'].run
    learn.fit(1, 0.05, cbs=[GradientAccumulation(32)]+listen())
    assert ended(run)[1]=={'samples':'', **dict.fromkeys(['raw_loss','train_loss','valid_loss','accuracy'], 'samples')}

class Clock(Callback):
    "Micro-batches take 1, 2, 3, 4 seconds, 1, 2, …"
    run_valid = False
    def __init__(self): self.now,self.n = 0.,0
    def after_backward(self): self.now,self.n = self.now+1+self.n%4,self.n+1

def test_samples_per_second_are_a_steps_samples_over_its_time(tmp_path, monkeypatch):
    learn,clock = learner(tmp_path/'a'),Clock()
    listen,_ = wandb(learn, learn.path)
    run = sys.modules['wandb'].run
    with monkeypatch.context() as m:
        m.setattr(time, 'perf_counter', lambda: clock.now)
        learn.fit(1, 0.05, cbs=[GradientAccumulation(32),clock]+listen())
    rates = [o['train_samples_per_sec'] for o in ended(run)[0] if 'raw_loss' in o]
    assert deviation(rates, [32/10,28/10])<1e-6

def test_a_model_is_logged_only_if_one_is_saved(tmp_path):
    learn = learner(tmp_path/'a')
    listen,_ = wandb(learn, learn.path, log_model=True)
    before = weights(learn)
    with pytest.raises(ValueError, match='SaveModelCallback'): learn.fit(1, 0.05, cbs=listen())
    assert weights(learn).equal(before)

def pictures(d):
    learn = quiet(vision(4, smooth, custom_head=linear(8), path=d))
    return learn,[GradientAccumulation(16)]

@pytest.mark.parametrize('every_epoch,steps', [(False,[3]), (True,[1,3])])
def test_predictions_model_and_dataset_are_logged_at_steps(every_epoch, steps, tmp_path, monkeypatch):
    for nm in ('data','out'): (tmp_path/nm).mkdir()
    (tmp_path/'data'/'pictures.txt').write_text('some')
    learn,acc = pictures(tmp_path/'out')
    listen,_ = wandb(learn, tmp_path, log_preds=True, log_preds_every_epoch=every_epoch, n_preds=4, log_model=True,
        log_dataset=tmp_path/'data')
    import wandb as wb
    artifacts,tables,log = [],[],wb.log
    # W&B refuses the first offline
    for nm in ('use_artifact','log_artifact'): monkeypatch.setattr(type(wb.run), nm, lambda self, o: artifacts.append(o.type))
    monkeypatch.setattr(wb, 'log',
        lambda row, **kw: tables.append((row,kw['step'])) if 'Prediction_Samples' in row else log(row, **kw))
    learn.fit(2, 0.05, cbs=[*acc,SaveModelCallback(),*listen()])
    assert [(len(row['Prediction_Samples'].data),step) for row,step in tables]==[(4,o) for o in steps]
    assert artifacts==['dataset','model'] and len(learn.recorder.losses)==4

def test_tensorboard_draws_the_graph_and_predictions(tmp_path):
    learn,acc = pictures(tmp_path)
    listen,_ = tensorboard(learn, tmp_path, trace_model=True, log_preds=True)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    learn.fit(2, 0.05, cbs=acc+listen())
    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.Tags()['graph'] and [o.step for o in events.Images('Sample results')]==[2,4]
    assert len(learn.recorder.losses)==4
