"""What the benchmarks on several processes share. Each is a script that launches itself (gloo, on this machine), with
`--worker FILE` for its processes, of which the first writes to that file what came of it."""
import datetime, json, platform, subprocess, sys, tempfile
from pathlib import Path

def measured(
    script, # The benchmark's `__file__`
    n # Number of processes
):
    "What `n` processes of `script` found"
    with tempfile.TemporaryDirectory() as tmp:
        out = Path(tmp)/'res.json'
        subprocess.run([sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', str(n),
                        script, '--worker', str(out)], check=True, timeout=600)
        return json.loads(out.read_text())

def joined(secs=60):
    "Be one of the processes, in one thread: after `secs` without the others, an error"
    import torch
    torch.set_num_threads(1)
    torch.distributed.init_process_group('gloo', timeout=datetime.timedelta(seconds=secs))

def ended(res, out):
    "All have come here: the first writes `res` to the file `out`"
    from torch import distributed as dist
    if not dist.get_rank(): Path(out).write_text(json.dumps(res))
    dist.destroy_process_group()

def learner(batches, bs, model, cbs=None):
    "A Learner of ready-made `batches`, so that loading costs nothing, that shows nothing"
    import torch
    from fastai.callback.progress import ProgressCallback
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner
    from fastai.optimizer import SGD
    from fastcore.basics import noop
    class Batches(list): pass
    Batches.bs,Batches.device = bs,torch.device('cpu')
    learn = Learner(DataLoaders(Batches(batches), Batches()), model, torch.nn.CrossEntropyLoss(), opt_func=SGD, cbs=cbs)
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return learn

def arguments(
    parser, # `argparse.ArgumentParser` with the benchmark's own arguments
    hardware # In words
):
    "Arguments of the command line"
    parser.add_argument('--hardware', default=hardware, help='in words')
    parser.add_argument('--worker', help='for the processes that it launches')
    return parser.parse_args()

def versions():
    "What was measured with"
    import fastai, torch
    return f'fastai {fastai.__version__}, torch {torch.__version__}, python {platform.python_version()}'

def printed(
    title, # What stands before the table
    lines, # The table's lines
    out # `Path` of the file to append it to, or `None`
):
    "Print a table of today's, and append it to a file"
    text = '\n'.join([f'## {datetime.date.today()}, {title}', '', *lines])
    print(text)
    if out is None: return
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open('a') as f: f.write(text+'\n\n')
