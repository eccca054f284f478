"""The documentation site, in a real browser: `make docs-test` builds it and runs this.

Where the site has not been built it is not tested, and without Chromium not in a browser; pytest says so. `SITE=built`
makes a failure of the former. `SHOTS=folder` keeps a picture of each page, wide and narrow, light and dark.
"""
import functools, http.server, inspect, json, os, re, shutil, sys, threading
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin
import pytest

root = Path(__file__).resolve().parent.parent
site = root/'_docs'
chromium = shutil.which('chromium') or shutil.which('chromium-browser') or shutil.which('google-chrome')

def skip(why):
    if os.environ.get('SITE')=='built': pytest.fail(f'the site should have been built, but {why}')
    pytest.skip(f'THE SITE IS NOT TESTED: {why}', allow_module_level=True)
if not (site/'.fingerprint').exists(): skip('it has not been built: make docs')
try: from playwright.sync_api import sync_playwright
except ImportError: skip('playwright is not installed: make docs')
sys.path.insert(0, str(root/'docs'))
from nbdev.doclinks import nbglob
from build import fingerprint, hides, maths, order, page as page_of, split_errors, wings
if (site/'.fingerprint').read_text()!=fingerprint(): skip('it is older than what it is made of: make docs')
needs_browser = pytest.mark.skipif(not chromium,
    reason='THE SITE IS NOT TESTED IN A BROWSER: install Chromium (tools/chromium.sh, on Debian and Ubuntu)')

pages = sorted(o.relative_to(site).as_posix() for o in site.rglob('*.html') if '_static' not in o.parts)
names = json.loads((site/'names.json').read_text())

# What can be seen without a browser

class Links(HTMLParser):
    "The ids and links of a page, and the links to source by the id of their name"
    def __init__(self, page):
        super().__init__()
        self.ids,self.hrefs,self.sources,self.dt = set(),[],{},None
        self.feed((site/page).read_text(encoding='utf-8'))
    def handle_starttag(self, tag, attrs):
        a = dict(attrs)
        if 'id' in a: self.ids.add(a['id'])
        if tag=='dt': self.dt = a.get('id')
        elif tag=='dd': self.dt = None
        for k in ('href','src'):
            if a.get(k): self.hrefs.append(a[k])
        if self.dt and '/blob/' in a.get('href', ''): self.sources[self.dt] = a['href']

@functools.cache
def links(page): return Links(page)

def test_every_section_has_pages():
    for o in ('tutorials','explanations','guarantees','api','built',*wings): assert f'{o}/index.html' in pages
    single = ('index','troubleshooting','cheat_sheet','upstream','differences','compatibility','coming_from',
        'changelog','contributing','search')
    for o in single: assert f'{o}.html' in pages

@pytest.mark.parametrize('page', pages)
def test_links_resolve(page):
    bad = []
    for href in links(page).hrefs:
        url,anchor = urldefrag(urljoin(f'http://site/{page}', href))
        if not url.startswith('http://site/'): continue
        path = unquote(url.removeprefix('http://site/').partition('?')[0]) or 'index.html'
        if not (site/path).is_file(): bad.append(href)
        elif anchor and path.endswith('.html') and unquote(anchor) not in links(path).ids: bad.append(href)
    assert not bad

doors = sorted({o.stem for o in (root/'fastaccum').glob('[a-z]*.py')}-{'all'})

@functools.cache
def sidebar(page):
    "The pages that its sidebar leads to, in that order, each with how deep it is below its section"
    text = (site/page).read_text(encoding='utf-8').partition('<div class="sidebar-tree">')[2].partition('</div>')[0]
    found = re.findall(r'<li class="toctree-l(\d)[^"]*"><a class="[^"]*" href="([^"]+)"', text)
    return [(urljoin(page, page.rpartition('/')[2] if href=='#' else href), int(depth)) for depth,href in found]

def below(page):
    "The pages directly below one, in the order of the sidebar"
    tree = sidebar(page)
    at = [o for o,_ in tree].index(page)
    depth,inside = tree[at][1],[]
    for o,d in tree[at+1:]:
        if d<=depth: break
        if d==depth+1: inside.append(o)
    return inside

def numbered(folder):
    "The modules' pages in a folder, as their numbers say"
    fns = sorted(folder.glob('[0-9]*_*.ipynb'), key=lambda o: int(o.name.partition('_')[0]))
    return [f'{o.relative_to(root/"nbs").parent}/{o.stem.partition("_")[2]}.html'.removeprefix('./') for o in fns]

def test_sidebar_has_the_doors_and_the_wings():
    assert below('api/index.html')==numbered(root/'nbs')
    assert sorted(below('api/index.html'))==[f'{o}.html' for o in doors]
    assert below('built/index.html')==[f'{o}/index.html' for o in wings]
    for o in wings: assert below(f'{o}/index.html')==numbered(root/'nbs'/o)!=[]

def test_errors_are_told_apart_from_the_docstring():
    doc = 'Refuse it\n\nMore: about it\n\nTypeError: it is\n  no number\ntorch.OutOfMemoryError: too large\n'
    text,errors = split_errors(doc)
    assert text=='Refuse it\n\nMore: about it'
    assert errors==[['TypeError','it is no number'], ['torch.OutOfMemoryError','too large']]
    assert split_errors('ValueError: is only the first line')==('ValueError: is only the first line', [])

@pytest.mark.parametrize('name', names)
def test_errors_have_a_table(name):
    from build import resolve
    page = module(names[name])
    o = resolve(import_module(f'fastaccum.{page}'.replace('/', '.')), name)
    if not (inspect.isclass(o) or inspect.isfunction(o)): return
    docs = [o.__doc__] + ([o.__init__.__doc__] if inspect.isclass(o) and '__init__' in vars(o) else [])
    errors = [e for doc in filter(None, docs) for e in split_errors(inspect.cleandoc(doc))[1]]
    text = (site/f'{page}.html').read_text(encoding='utf-8')
    entry = text.partition(f'id="{names[name]}"')[2].partition('</dl>')[0]
    assert ('<p>Errors</p>' in entry)==bool(errors)
    for o,_ in errors: assert f'>{o}</span>' in entry and f'{o}:' not in entry

def test_pages_that_the_modules_name_exist():
    for fn in (root/'fastaccum').rglob('*.py'):
        text = fn.read_text(encoding='utf-8')
        for o in re.findall(r'https://fastaccum.github.io/fastaccum/(\S+?)["\s]', text): assert (site/o).is_file(), o

def test_every_public_name_has_an_entry():
    for fn in (root/'fastaccum').rglob('[a-z]*.py'):
        mod = import_module('.'.join(fn.relative_to(root).with_suffix('').parts))
        own = [nm for nm in getattr(mod, '__all__', []) if fn.stem!='all']
        documented = {nm.split('.')[-1] for nm in names}   # nbdev lists some patched methods as names
        assert [nm for nm in own if nm not in documented]==[], fn.name

def module(full):
    "The module within fastaccum in which a public name is, as the name of its page: core/mean"
    *folders,nm = full.split('.')[1:]
    while not (root/'fastaccum'/'/'.join([*folders,nm])).with_suffix('.py').is_file(): *folders,nm = folders
    return '/'.join([*folders,nm])

@pytest.mark.parametrize('name', names)
def test_entry(name):
    "A public name has an anchor, and a link to the lines that define it"
    full = names[name]
    page = f'{module(full)}.html'
    assert {full,name.lower()} <= links(page).ids
    pinned,path,line = re.search(r'/blob/([^/]+)/([^#]+)(?:#L(.+))?$', links(page).sources[full]).groups()
    assert pinned!='main' or not (root/'.git').exists()   # that moves on, and the lines with it
    text = (root/path).read_text(encoding='utf-8').split('\n')
    short = name.split('.')[-1]
    if line: assert re.search(fr'(def|class) {short}\b', '\n'.join(text[int(line.split('-')[0])-1:][:3]))
    else: assert re.search(fr'^{short}\b', '\n'.join(text), re.M)

tutorials = [o.removesuffix('.html') for o in below('tutorials/index.html')]

def test_tutorials_have_one_order():
    "In the sidebar, and where the home page names them"
    assert [o for o in order['tutorials'] if f'tutorials/{o}' in tutorials]==[o.partition('/')[2] for o in tutorials]
    body = (site/'index.html').read_text(encoding='utf-8').partition('id="read-on"')[2].partition('What is promised')[0]
    named = re.findall(r'href="(tutorials/\w+)\.html', body)
    assert len(named)>4 and named==[o for o in tutorials if o in named]

@pytest.mark.parametrize('page', tutorials)
def test_tutorials_open_in_colab(page):
    colab = f'https://colab.research.google.com/github/fastaccum/fastaccum/blob/main/nbs/{page}.ipynb'
    assert colab in links(f'{page}.html').hrefs
    text = (site/f'{page}.html').read_text(encoding='utf-8')
    assert 'google.colab' not in text   # the cell that installs is not shown

def test_a_tutorial_installs_in_colab_and_nowhere_else(monkeypatch):
    import colab, subprocess
    assert not colab.main(check=True)
    ran = []
    monkeypatch.setattr(subprocess, 'run', lambda *args, **kwargs: ran.append(args[0]))
    exec(colab.source, {})
    assert ran==[]
    monkeypatch.setitem(sys.modules, 'google.colab', colab)
    exec(colab.source, {})
    assert ran and ran[0][-1].startswith('git+https://github.com/')

def test_what_the_site_hides():
    "Plumbing, and never an import that the cells below need"
    assert hides({'hide':''}, '#| hide\nimport nbdev; nbdev.nbdev_export()')
    assert hides({'hide':''}, '#| hide\nfrom nbdev.showdoc import *') and hides({'default_exp':'x'}, '')
    assert hides({'hide':''}, 'assert 1') and hides({'hide':''}, '%matplotlib inline')
    assert not hides({'hide':''}, '#| hide\nfrom nbdev.showdoc import *\nimport torch') and not hides({}, 'assert 1')
    text = (site/'accumulation.html').read_text(encoding='utf-8')
    assert 'Show the imports' in text and 'showdoc' not in text and 'nbdev_export' not in text

def test_formulas_are_drawn():
    svg = maths(r'with $\frac12|\theta-x|^2$, `$HOME/$USER` and $$B = \frac{\mathrm{tr}\,\Sigma}N$$ it')
    assert svg.count('<svg class="math"')==2 and '`$HOME/$USER`' in svg and svg.count('$')==2
    block = '```\n$HOME/$USER\n```'
    assert maths(block)==block
    for page in pages:
        text = (site/page).read_text(encoding='utf-8').partition('<article')[2].partition('</article>')[0]
        assert '$' not in re.sub(r'<(pre|code|svg)\b.*?</\1>', '', text, flags=re.S), page   # what is code may have one

@pytest.mark.parametrize('page', [o for o in pages if o not in ('search.html','genindex.html','py-modindex.html')])
def test_page_is_described(page):
    "To search engines and those who share its address; the repository is one click away"
    text = (site/page).read_text(encoding='utf-8')
    told = re.search(r'<meta name="description" content="([^"]{10,})">', text)
    assert told and '`' not in told[1]
    picture = re.search(r'<meta property="og:image" content="https://fastaccum.github.io/fastaccum/([^"]+)">', text)
    assert picture and (site/picture[1]).is_file()
    assert 'class="repository" href="https://github.com/fastaccum/fastaccum"' in text

def test_no_two_pages_are_described_alike():
    texts = [(site/o).read_text(encoding='utf-8') for o in pages]
    told = [o[1] for o in (re.search('<meta name="description" content="([^"]+)', t) for t in texts) if o]
    assert len(told)>70 and len(set(told))==len(told)

def test_preview_is_the_picture_of_the_home_page():
    assert (root/'docs/preview.png').read_bytes()==(root/'images/same-run.png').read_bytes()

def test_every_notebook_is_there_as_markdown():
    "With its text, and with links to pages and pictures that are there"
    fns = {nb:site/f'{page_of(nb.relative_to(root/"nbs"))}.html.md' for nb in nbglob(root/'nbs', as_path=True)}
    assert set(site.rglob('*.html.md'))==set(fns.values())
    for nb,fn in fns.items():
        text = fn.read_text(encoding='utf-8')
        title = ''.join(json.loads(nb.read_text(encoding='utf-8'))['cells'][0]['source'][:1])
        assert text.startswith(title.strip()), fn
        text = re.sub(r'^```.*?^```', '', text, flags=re.M|re.S)
        assert not re.search(r'\]\((?!http)[^)]*\.ipynb', text), fn
        named = re.findall(r'\]\(https://fastaccum\.github\.io/fastaccum/?([^)#\s]*)', text)
        assert [o for o in named if not (site/(o or 'index.html')).is_file()]==[], fn

# What a fastai user asks, and the page that answers: two clicks from the home page, by way of the FAQ
questions = {
    'CUDA out of memory': 'tutorials/fit_in_memory',
    'My BatchNorm model': 'explanations/batchnorm',
    'How large should': 'tutorials/how_large',
    'My loss is NaN': 'tutorials/mixed_precision',
    'Fewer steps in W&amp;B': 'tutorials/watch',
    'Which learning rate': 'tutorials/choose',
    'Does it hold for my model': 'tutorials/accum_check',
    'MixUp, CutMix and contrastive': 'explanations/which_way',
    'Steps have another size': 'guarantees/drop_last',
    'Training is slow': 'explanations/when_not',
    'Several GPUs': 'tutorials/launch',
    'How do I resume': 'tutorials/launch',
    'Validation differs': 'tutorials/accum_check'}

def test_questions_are_answered_in_two_clicks():
    assert 'troubleshooting.html' in links('index.html').hrefs and len(questions)>=10
    page = (site/'troubleshooting.html').read_text(encoding='utf-8').partition('<article')[2]
    sections = page.partition('<section id="faq')[2].split('<section id="')[1:]
    lost = [q for q,page in questions.items()
        if not any(q in o.partition('</h3>')[0] and f'href="{page}.html' in o for o in sections)]
    assert not lost

def test_cells_of_a_table_on_a_phone_are_under_its_heads():
    "The style sheet names the columns that a phone has no room for"
    style = (site/'_static/style.css').read_text(encoding='utf-8')
    said = re.findall(r'#what-accumulation-cannot-show td:nth-child\(\d\) > p::before \{ content: "(.+?): "', style)
    text = (site/'index.html').read_text(encoding='utf-8')
    section = text.partition('<section id="what-accumulation-cannot-show"')[2]
    heads = re.findall(r'<th class="head">(.*?)</th>', section.partition('</thead>')[0], re.S)
    assert said==[re.sub('<.*?>', '', o).strip() for o in heads][1:]!=[]

# What cannot

@pytest.fixture(scope='session')
def url():
    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args): pass
    class Server(http.server.ThreadingHTTPServer):
        def handle_error(self, *args): pass   # the browser went on before it had everything
    with Server(('127.0.0.1', 0), functools.partial(Handler, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f'http://127.0.0.1:{server.server_port}/'
        server.shutdown()

@pytest.fixture(scope='session')
def browser():
    with sync_playwright() as p:
        args = ['--no-sandbox', '--disable-gpu', '--disable-background-networking']
        browser = p.chromium.launch(executable_path=chromium, args=args)
        yield browser
        browser.close()

# The badges at home are made elsewhere: all that a page may fetch, and here it is a picture of their size
badges = re.compile(r'https://(img\.shields\.io/pypi/|github\.com/[^?]+/badge\.svg)')
svg = '<svg xmlns="http://www.w3.org/2000/svg" width="110" height="20"/>'

@pytest.fixture(scope='session')
def opened(browser, url):
    "A tab for all tests, which notes what goes wrong in it"
    context = browser.new_context()
    context.route(badges, lambda o: o.fulfill(content_type='image/svg+xml', body=svg))
    context.grant_permissions(['clipboard-read','clipboard-write'], origin=url.rstrip('/'))
    page,wrong = context.new_page(),[]
    page.set_default_timeout(120_000)   # ms: a busy machine takes its time
    page.on('console', lambda o: o.type=='error' and wrong.append(f'console: {o.text}'))
    page.on('pageerror', lambda o: wrong.append(f'error: {o}'))
    # going on ends requests
    page.on('requestfailed', lambda o: 'ABORTED' in (o.failure or '') or wrong.append(f'request failed: {o.url}'))
    def stays(o): return o.url.startswith((url,'data:')) or badges.match(o.url)
    page.on('request', lambda o: stays(o) or wrong.append(f'leaves the machine: {o.url}'))
    page.wrong = wrong
    yield page
    context.close()

@pytest.fixture
def tab(opened):
    opened.wrong.clear()
    return opened

look = """() => {
    const wrong = [], width = document.documentElement.clientWidth, all = (s) => [...document.querySelectorAll(s)];
    const seen = (e) => e.getClientRects().length > 0;
    const scrolls = (e) => { for (; e && e.tagName != 'BODY'; e = e.parentElement)
        if (['auto','scroll'].includes(getComputedStyle(e).overflowX)) return e; return null; };
    const whole = document.documentElement.scrollWidth;
    if (whole > width) wrong.push(`scrolls sideways: ${whole} > ${width}`);
    for (const e of all('article img')) {
        if (!e.alt) wrong.push(`no alt text: ${e.src}`);
        if (!e.naturalWidth) wrong.push(`no picture: ${e.src}`);
        if (seen(e) && e.getBoundingClientRect().right > width+1) wrong.push(`picture cut: ${e.src}`);
    }
    for (const e of all('article table').filter(seen)) {
        const box = scrolls(e);
        if ((box || e).getBoundingClientRect().right > width+1) wrong.push(`table cut: ${e.textContent.slice(0, 40)}`);
        if (width > 1000 && box && box.scrollWidth > box.clientWidth+1)
            wrong.push(`table scrolls: ${e.textContent.slice(0, 40)}`);
        const cells = [...e.querySelectorAll('td')].map(o => o.textContent.length);
        const text = !e.closest('details') && cells.reduce((a,b) => a+b, 0) > 40*cells.length;
        if (width < 500 && text && box && box.scrollWidth > box.clientWidth+1)
            wrong.push(`table of text scrolls: ${e.textContent.slice(0, 40)}`);
    }
    const link = document.querySelector('a.repository'), title = document.querySelector('article h1');
    if (width < 500 && link && title && link.getBoundingClientRect().bottom >
        title.getBoundingClientRect().top + parseFloat(getComputedStyle(title).paddingTop))
        wrong.push('the link to GitHub touches the title');
    // in the pages of modules each is a function
    const lone = (e) => e && e.matches('div.cell') && e.querySelector(':scope > details.hide') &&
        !e.querySelector(':scope > .cell_output') && !document.querySelector('article dl.py');
    for (const e of all('article div.cell'))
        if (lone(e) && lone(e.nextElementSibling)) wrong.push(`folded twice: ${e.textContent.trim().slice(0, 40)}`);
    for (const e of all('article pre').filter(seen)) {
        const style = getComputedStyle(e);
        if (width < 500 && e.closest('.output:not(.stderr)') && style.whiteSpace != 'pre')
            wrong.push(`columns wrap: ${e.textContent.slice(0, 40)}`);
        if (e.scrollWidth <= e.clientWidth+1) continue;
        if (!e.closest('.cell_output')) wrong.push(`code cut: ${e.textContent.slice(0, 40)}`);
        else if (!['auto','scroll'].includes(style.overflowX)) wrong.push(`output cut: ${e.textContent.slice(0, 40)}`);
    }
    for (const e of all('article p'))
        if (/^\\||\\]\\(|^#+ |```/.test(e.textContent)) wrong.push(`Markdown left over: ${e.textContent.slice(0, 40)}`);
    for (const e of all('article div.highlight').filter(e => !e.closest('.cell_output')))
        if (!e.querySelector('button.copybtn')) wrong.push(`no copy button: ${e.textContent.slice(0, 40)}`);
    const linear = (o) => (o /= 255) <= .04045 ? o/12.92 : ((o+.055)/1.055)**2.4;
    const light = (c) => { const v = c.match(/[\\d.]+/g).map(Number).slice(0, 3).map(linear);
        return .2126*v[0]+.7152*v[1]+.0722*v[2]; };
    const ground = light(getComputedStyle(document.body).backgroundColor);
    for (const e of all('article p, article li, article td, article h1, .sidebar-tree a').filter(seen)) {
        const [a,b] = [light(getComputedStyle(e).color), ground].sort((x,y) => y-x);
        if ((a+.05)/(b+.05) < 4.5) { wrong.push(`hard to read: ${e.textContent.slice(0, 40)}`); break; }
    }
    return [wrong, ground];
}"""

# Where an element ends, in pixels from the top of the screen
ends = "(s) => { const e = document.querySelector(s); return e ? e.getBoundingClientRect().bottom : Infinity; }"

@needs_browser
@pytest.mark.parametrize('page', pages)
def test_page(tab, url, page):
    "Each page is loaded once; its folded code is unfolded, so that it is looked at too"
    shots = os.environ.get('SHOTS')
    tab.set_viewport_size(dict(width=1440, height=900))
    tab.goto(url+page, wait_until='load')
    if page=='cheat_sheet.html': assert tab.evaluate(ends, 'section#words table')<=900   # one screen
    if page.removesuffix('.html') in doors: begins_with_what_one_imports(tab, page.removesuffix('.html'))
    for device,size in (('wide',(1440,900)), ('narrow',(390,844))):
        tab.set_viewport_size(dict(width=size[0], height=size[1]))
        for scheme in ('light','dark'):
            tab.emulate_media(color_scheme=scheme)
            if shots: tab.screenshot(path=f'{shots}/{page.replace("/", "-")}-{device}-{scheme}.png', full_page=True)
            tab.evaluate("document.querySelectorAll('article details').forEach(o => o.open = true)")
            wrong,ground = tab.evaluate(look)
            assert wrong+tab.wrong==[], (device,scheme)
            assert (ground<0.2)==(scheme=='dark')

def begins_with_what_one_imports(tab, door):
    "Signature and parameters are in the first screen of a door"
    assert tab.evaluate(ends, 'article dl.py > dt')<500
    long = door in ('accumulation','accum_find')   # their last rows are below
    table = 'article dl.py table tr' if long else 'article dl.py table'
    assert tab.evaluate(ends, table)<=900

# all words at once, in the page of the search: for each of them, where what it found leads to
search = """(words) => Object.fromEntries(words.map((o) => [o,
    Search._performSearch(...Search._parseQuery(o)).map(([page,,anchor]) => page + '.html' + anchor)]))"""

@pytest.fixture
def found(tab, url):
    "A function that searches for words"
    tab.goto(f'{url}search.html?q=GradientAccumulation')   # one as a reader does
    tab.wait_for_selector('#search-results a[href$="#fastaccum.accumulation.GradientAccumulation"]',
        state='attached')
    yield lambda words: tab.evaluate(search, list(words))
    assert not tab.wrong

@needs_browser
def test_search_finds_every_public_name(found):
    results = found(names)
    assert [nm for nm,full in names.items() if not any(o.endswith(f'#{full}') for o in results[nm])]==[]

@needs_browser
def test_search_finds_words(found):
    words = dict(carried='every_sample_once', overflow='mixed_precision', Lightning='coming_from',
        FAQ='troubleshooting', BatchNorm='batchnorm', vision_learner='vision', memory='fit_in_memory')
    results = found(words)
    assert [w for w,page in words.items() if not any(page in o for o in results[w])]==[]

@needs_browser
def test_copying(tab, url):
    tab.goto(url)
    block = tab.locator('div.highlight', has_text='make demo').first
    block.hover()
    block.locator('button.copybtn').click()
    assert 'make demo' in tab.evaluate('navigator.clipboard.readText()')
    assert 'make test' in tab.evaluate('navigator.clipboard.readText()')
