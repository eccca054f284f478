"Run code as in a new interpreter, in a process that has imported fastai: the import takes longer than most code."
import gc, multiprocessing, os, runpy, sys, traceback, warnings
from contextlib import suppress
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory
from pasted import processes, root

def _run(file, folder, out, env, quiet):
    "Run the Python file `file` in the folder `folder` as the main program, and exit"
    multiprocessing.set_start_method(None, force=True)   # workers of loaders start as in any interpreter
    gc.freeze()                                          # exclude fastai's objects from garbage collection
    for stream,text_file in (('stdout',sys.stdout), ('stderr',sys.stderr)):
        with open(out/stream, 'wb') as new: os.dup2(new.fileno(), text_file.fileno())
        text_file.reconfigure(encoding='utf-8')
    os.environ.update(env)
    os.chdir(folder)
    sys.path.insert(0, str(root))
    sys.argv = [str(file)]
    if quiet: warnings.simplefilter('ignore')
    code = 0
    try: runpy.run_path(str(file), run_name='__main__')
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout,sys.stderr): stream.flush()
    os._exit(code)

def run(code:str|Path, quiet:bool=False, timeout:float=300, **env)->CompletedProcess:
    "Run a file or a text of Python code; `quiet` ignores warnings, and `env` are variables of the environment"
    with TemporaryDirectory(ignore_cleanup_errors=True) as tmp:
        tmp = Path(tmp).resolve()
        file = code if isinstance(code, Path) else tmp/'code.py'
        if file is not code: file.write_text(code, encoding='utf-8')
        process = processes.Process(target=_run, args=(file, Path.cwd(), tmp, env, quiet))
        process.start()
        try: process.join(timeout)
        finally: process.kill()
        process.join()
        texts = []
        for stream in ('stdout','stderr'):
            with suppress(FileNotFoundError): texts.append((tmp/stream).read_text(encoding='utf-8'))
    return CompletedProcess([str(file)], process.exitcode, *texts)
