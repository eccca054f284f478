"Lightning's Trainer with `accumulate_grad_batches`."
import logging, os, warnings, torch
import lightning.pytorch as pl
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins.precision import MixedPrecision
from .cases import grad_scaler
from .peer import Peer, whole

# Importing Lightning sets this variable for the whole process. With it `torch.cuda.is_available()`, which fastai calls
# for each batch, takes many times as long. All arms of `fast` run in one process, and those that use fastai would pay.
os.environ.pop('PYTORCH_NVML_BASED_CUDA_CHECK', None)
for nm in ('lightning.pytorch','lightning.pytorch.utilities.rank_zero','lightning.fabric'):
    logging.getLogger(nm).setLevel(logging.ERROR)
warnings.filterwarnings('ignore')

class Logged(Logger):
    "Keeps what is logged"
    name,version = 'logged',0
    def __init__(self):
        super().__init__()
        self.losses = []
    def log_hyperparams(self, *args, **kwargs): pass
    def log_metrics(self, metrics, step=None):
        if 'loss' in metrics: self.losses.append(metrics['loss'])

class Module(pl.LightningModule):
    def __init__(self, model, case, log):
        super().__init__()
        self.model,self.case,self.logs = model,case,log
    def forward(self, x): return self.model(x)
    def training_step(self, batch, batch_idx):
        x,y = batch
        pred = self(x)
        loss = self.case.loss(pred.float() if self.case.amp else pred, y)
        if self.logs: self.log('loss', loss)
        return loss
    def configure_optimizers(self):
        case,opt = self.case,torch.optim.SGD(self.model.parameters(), lr=self.case.lr, momentum=self.case.mom)
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
        return pl.Trainer(max_epochs=epochs, accumulate_grad_batches=k, gradient_clip_val=case.clip, devices=1,
            accelerator='gpu' if case.device=='cuda' else 'cpu', plugins=[plugins[case.amp]()] if case.amp else None,
            logger=self.logger, log_every_n_steps=1, enable_progress_bar=False, enable_checkpointing=False,
            enable_model_summary=False)

    def fit(self, data, epochs, micro, accum):
        module = Module(self.model, self.case, log=self.case.kind!='fast')
        self.trainer(epochs, whole(micro, accum)).fit(module, data.loader(micro))

    def losses(self): return self.logger.losses

peers = [Lightning]
