"""Test that the cells of a notebook which the site shows can be pasted into a new interpreter.

nbdev's `test_nb` runs the notebook, including the cells that the site hides. A cell that the site shows must not use a
name that a hidden cell has defined.
"""
import ast, gc, json, multiprocessing, os, re, shutil, signal, sys, tempfile, warnings
from contextlib import suppress
from pathlib import Path

root = Path(__file__).resolve().parent.parent

# Importing fastai takes longer than most pages do. On Linux, a page runs in a fork of a process that has imported it;
# macOS cannot fork safely and Windows cannot fork at all, so each page starts a new interpreter on these systems.
processes = multiprocessing.get_context('forkserver' if sys.platform=='linux' else 'spawn')
processes.set_forkserver_preload(['fastai.vision.all', 'fastai.text.all', 'fastai.tabular.all', 'nbdev.showdoc',
    'nbdev.test', 'IPython'])

re_nbdev = re.compile(
    r'^(?:from nbdev\.showdoc import \*|import nbdev; nbdev\.nbdev_export\(\))\n?', re.MULTILINE)

def only_imports(source):
    "Whether `source` consists of imports only, without IPython magics"
    try: return all(isinstance(o, (ast.Import,ast.ImportFrom)) for o in ast.parse(source).body)
    except SyntaxError: return False

def hides(options, source):
    "Whether the site hides a cell with these nbdev directives; imports are folded instead, because readers need them"
    if 'default_exp' in options: return True
    if 'hide' not in options: return False
    imports_something = only_imports(source) and ast.parse(re_nbdev.sub('', source)).body
    return not imports_something

def without_hidden_names(Shell):
    "Return a subclass of nbdev's `Shell` that removes the names of a hidden cell after it has run"
    class Pasted(Shell):
        hidden_names = None
        def cell(self, cell, **kwargs):
            if cell.cell_type!='code' or not hides(cell.directives_, cell.source): return super().cell(cell, **kwargs)
            if self.hidden_names is None: self.hidden_names = {}
            shown_names = dict(self.user_ns)
            self.user_ns.update(self.hidden_names)   # hidden cells can use the names of earlier hidden cells
            super().cell(cell, **kwargs)
            for name,value in list(self.user_ns.items()):
                is_new = name not in shown_names or shown_names[name] is not value
                if name.startswith('_') or not is_new: continue
                self.hidden_names[name] = value
                if name in shown_names: self.user_ns[name] = shown_names[name]
                else: del self.user_ns[name]
    return Pasted

def copy_page(fn, folder):
    """Copy the notebook `fn`, with the files that notebooks read, into `folder`; return the path of the copy

    A notebook runs in the folder that contains it and may write files there, which the repository must not get.
    """
    page = fn.relative_to(root) if root in fn.parents else Path('nbs')/fn.name
    measured = [o for o in (root/'benchmarks').rglob('*') if o.is_file() and '__pycache__' not in o.parts]
    copies = {root/o.relative_to(root): folder/o.relative_to(root) for o in (root/'pyproject.toml',*measured)}
    for file,copy in {**copies, fn:folder/page}.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    return folder/page

def run(fn, folder):
    """Run the notebook `fn` and exit, with code 0 if it passed

    Its printed text goes to `output.txt` in `folder`, which also has its copy and its temporary files.
    """
    if hasattr(os, 'setsid'): os.setsid()                  # a process group, which can be ended together
    multiprocessing.set_start_method(None, force=True)     # DataLoader workers start as they do in any interpreter
    gc.freeze()                                            # exclude imported modules from garbage collection
    with open(folder/'output.txt', 'wb') as file:
        for stream in (1,2): os.dup2(file.fileno(), stream)
    (folder/'tmp').mkdir()
    tempfile.tempdir = os.environ['TMPDIR'] = str(folder/'tmp')
    page = copy_page(fn, folder)
    os.chdir(page.parent)                                  # nbdev finds its settings from here
    # `nbdev-test` runs several notebooks in one process, and one of them may have silenced warnings. So may the user,
    # with PYTHONWARNINGS. A notebook that asserts a warning must therefore set the filters itself.
    warnings.simplefilter('ignore')
    from nbdev import test
    from nbdev.config import get_config
    skip_flags = set(get_config(root).tst_flags.split())
    if os.environ.get('TESTS')=='all': skip_flags.discard('slow')
    test.CaptureShell = without_hidden_names(test.CaptureShell)
    passed,_ = test.test_nb(page, skip_flags=skip_flags, basepath=root, cell_timeout=300)   # seconds
    for stream in (sys.stdout,sys.stderr): stream.flush()
    os._exit(0 if passed else 1)                           # does not wait for threads of the notebook

def failure(fn):
    "Run the notebook `fn` in a new process; return an empty text, or the reason of its failure and its output"
    if not json.loads(fn.read_text(encoding='utf-8'))['cells']: return 'the notebook has no cells'
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as tmp:
        folder = Path(tmp).resolve()
        process = processes.Process(target=run, args=(fn, folder))
        process.start()
        try: process.join()
        finally:   # pytest-timeout may raise an exception
            process.kill()
            if hasattr(os, 'killpg'):
                with suppress(OSError): os.killpg(process.pid, signal.SIGKILL)   # and processes of the notebook
        output = folder/'output.txt'
        printed = output.read_text(encoding='utf-8', errors='replace').strip() if output.exists() else ''
    printed = printed.replace(str(folder), str(root))
    if process.exitcode==0: return ''
    why = 'a cell failed' if process.exitcode==1 else f'its process ended with exit code {process.exitcode}'
    errors = re.findall(r'^[\w.]+(?:Error|Exception)(?:: .*)?$', printed, re.MULTILINE)
    if errors and process.exitcode==1: why = errors[-1]
    return f'{why}\n\n{printed}'
