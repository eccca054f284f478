"Composer's Trainer, which splits batches from the loader into micro-batches, and weighs them by their targets."
import logging, warnings
warnings.filterwarnings('ignore')
import torch
from composer import DataSpec, Trainer
from composer.algorithms import GradientClipping
from composer.loggers import InMemoryLogger
from composer.models import ComposerModel
from .peer import Peer
logging.getLogger('composer').setLevel(logging.ERROR)

class Model(ComposerModel):
    def __init__(self, model, case):
        super().__init__()
        self.model,self.case = model,case
    def forward(self, batch): return self.model(batch[0])
    def loss(self, outputs, batch, *args, **kwargs): return self.case.loss(outputs, batch[1])

class Composer(Peer):
    key,title,package = 'composer','Composer','mosaicml'
    docs = 'https://docs.mosaicml.com/projects/composer/en/latest/trainer/using_the_trainer.html'
    how = 'Trainer(device_train_microbatch_size, accumulate_train_batch_on_tokens=True), the loader has the big batch'

    def twin_size(self, micro, accum): return accum

    def fit(self, data, epochs, micro, accum):
        case,self.log = self.case,InMemoryLogger()
        bs,micro = (accum,micro) if accum>0 else (64,accum//4)   # what can be wrong here is the size of a micro-batch
        spec = DataSpec(data.loader(bs), get_num_tokens_in_batch=lambda batch,**_: batch[1].ne(-100).sum().item())
        opt = torch.optim.SGD(self.model.parameters(), lr=case.lr, momentum=case.mom)
        # schedulers of Composer's own kind are a step late: they are asked before the batch is counted
        sched = case.lambda_lr(opt, case.steps(bs, len(data))) if case.cycle else None
        trainer = Trainer(model=Model(self.model, case), train_dataloader=spec, max_duration=f'{epochs}ep',
            loggers=[self.log],
            device='gpu' if case.device=='cuda' else 'cpu', precision=f'amp_{case.amp}' if case.amp else 'fp32',
            optimizers=opt, schedulers=sched, step_schedulers_every_batch=True,
            algorithms=[GradientClipping('norm', case.clip)] if case.clip else None,
            device_train_microbatch_size=micro, accumulate_train_batch_on_tokens=True, progress_bar=False)
        try: trainer.fit()
        finally: trainer.close()

    def losses(self): return [float(v) for v in self.log.get_timeseries('loss/train/total')['loss/train/total']]

peers = [Composer]
