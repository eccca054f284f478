"Lightning's Trainer with `accumulate_grad_batches`."
import logging, warnings, torch
import lightning.pytorch as pl
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.tuner import Tuner
from torchmetrics.classification import MulticlassAccuracy
from .cases import grad_scaler
from .peer import Peer, whole
for nm in ('lightning.pytorch','lightning.pytorch.utilities.rank_zero','lightning.fabric'):
    logging.getLogger(nm).setLevel(logging.ERROR)
warnings.filterwarnings('ignore')

class Logged(Logger):
    "Keeps what is logged"
    name,version = 'logged',0
    def __init__(self):
        super().__init__()
        self.losses,self.accs = [],[]
    def log_hyperparams(self, *args, **kwargs): pass
    def log_metrics(self, metrics, step=None):
        if 'loss' in metrics: self.losses.append(metrics['loss'])
        if 'acc' in metrics: self.accs.append(metrics['acc'])

class Module(pl.LightningModule):
    def __init__(self, model, case, log):
        super().__init__()
        self.model,self.case,self.logs,self.lr = model,case,log,case.lr
        if case.kind=='metrics': self.acc = MulticlassAccuracy(3, average='micro')
    def forward(self, x): return self.model(x)
    def training_step(self, batch, batch_idx):
        x,y = batch
        pred = self(x)
        loss = self.case.loss(pred.float() if self.case.amp else pred, y)
        if self.logs: self.log('loss', loss)
        if self.case.kind=='metrics':
            self.acc(pred, y)
            self.log('acc', self.acc, on_step=False, on_epoch=True)
        return loss
    def configure_optimizers(self):
        case,opt = self.case,torch.optim.SGD(self.model.parameters(), lr=self.lr, momentum=self.case.mom)
        if not case.cycle: return opt
        sched = case.lambda_lr(opt, self.trainer.estimated_stepping_batches)
        return dict(optimizer=opt, lr_scheduler=dict(scheduler=sched, interval='step'))

class Lightning(Peer):
    key,title,package = 'lightning','Lightning','lightning'
    docs = 'https://lightning.ai/docs/pytorch/stable/advanced/training_tricks.html#accumulate-gradients'
    how = 'Trainer(accumulate_grad_batches=k); the loss logged by `self.log`'

    def trainer(self, epochs, k):
        case,fast = self.case,self.case.kind=='fast'
        self.logger = False if fast else Logged()
        # Lightning takes bf16 for fp16 on a CPU, unless it is given the plugin
        plugins = dict(fp16=lambda: MixedPrecision('16-mixed', case.device, scaler=grad_scaler(case)),
                       bf16=lambda: MixedPrecision('bf16-mixed', case.device))
        cbs = [type(f'Idle{i}', (pl.Callback,), {})() for i in range(self.callbacks)]
        return pl.Trainer(max_epochs=epochs, accumulate_grad_batches=k, gradient_clip_val=case.clip, devices=1,
            accelerator='gpu' if case.device=='cuda' else 'cpu', plugins=[plugins[case.amp]()] if case.amp else None,
            logger=self.logger, log_every_n_steps=1, callbacks=cbs, enable_progress_bar=False,
            enable_checkpointing=False,
            enable_model_summary=False)

    def fit(self, data, epochs, micro, accum):
        module = Module(self.model, self.case, log=self.case.kind!='fast')
        self.trainer(epochs, whole(micro, accum)).fit(module, data.loader(micro))

    def losses(self): return self.logger.losses
    def accuracies(self): return self.logger.accs

    def lr_find(self, data, micro, accum, n):
        module,trainer = Module(self.model, self.case, log=False),self.trainer(self.case.epochs, whole(micro, accum))
        found = Tuner(trainer).lr_find(module, data.loader(micro), num_training=n, early_stop_threshold=None,
            update_attr=False)
        return found.results['lr'],found.results['loss']

peers = [Lightning]
