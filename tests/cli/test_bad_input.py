"""Bad input: exit 2, nothing on stdout, one line on stderr that names the value and the way out."""

import shlex

import pytest

SLICE = '{"q":[0,4],"k":[0,4]}'
RUN = '{"row":0,"token":0,"count":4}'

# Arguments, then what the message has to say.
CASES = [
    ("", ["no verb", "weft explain or weft verify"]),
    ("frobnicate", ["frobnicate", "use explain or verify"]),
    ("audit mine:attention --ranks 2", ["functions of Python", "python -m weft audit module:function"]),
    ("--frobnicate", ["--frobnicate", "weft --help"]),
    ("verify --frobnicate 1", ["--frobnicate", "weft verify --help"]),
    ("explain --docs 4 stray", ["stray", "weft explain --help"]),
    ("explain --docs", ["--docs", "weft explain --help"]),
    ("explain --docs 4 --docs 5", ["--docs", "weft explain --help"]),
    ("verify", ["no documents", "--docs 256,512,1024"]),
    ("verify --docs 5,0,7 --padded-to 3 --layout dual_chunk --ranks 2", ["padded length 6", "2*ranks = 4", "pad to 8"]),
    ("verify --docs 5,x", ["'x'", "--docs 256,512,1024"]),
    ("verify --docs 5,,6", ["''", "--docs 256,512,1024"]),
    ("verify --docs 5,1.5", ["'1.5'", "--docs 256,512,1024"]),
    ("verify --docs 5,-1", ["document 1", "-1", "use lengths from 0"]),
    ("verify --docs 99999999999999999999", ["99999999999999999999", "64 bits", "--docs 256,512,1024"]),
    ("verify --docs 2147483648", ["2147483648", "use lengths from 0"]),
    ("verify --docs 2147483647,1", ["2147483648", "split the pack"]),
    ("verify --docs lognormal:count=4", ["median", "lognormal:count=64,median=2400"]),
    ("verify --docs lognormal:count=0,median=4", ["count=0", "use a count from 1"]),
    ("verify --docs lognormal:count=4,median=nan", ["nan", "lognormal:count=64,median=2400"]),
    ("verify --docs lognormal:count=4,median=-3", ["median=-3", "above 0"]),
    ("verify --docs lognormal:count=4,median=3,sigma=-1", ["sigma=-1", "0 or more"]),
    ("verify --docs lognormal:count=4,median=3,mode=1", ["'mode'", "lognormal:count=64,median=2400"]),
    ("verify --docs lognormal:count=4,median=3,min=9,max=4", ["min=9, max=4", "min <= max"]),
    ("verify --docs 4 --cu-seqlens 0,4", ["--docs 4", "--cu-seqlens 0,4", "not both"]),
    ("verify --docs 4 --cu-seqlens-padded 0,4", ["--cu-seqlens-padded 0,4", "not both"]),
    ("verify --cu-seqlens 0,4,2", ["cu_seqlens[2] = 2", "never fall"]),
    ("verify --cu-seqlens -5,4", ["-5", "start at row 0"]),
    ("verify --cu-seqlens 0,4 --cu-seqlens-padded 0,3", ["4 used tokens", "3 rows", "pad it to at least 4"]),
    ("verify --cu-seqlens 0,4 --cu-seqlens-padded 0,4,8", ["2 entries", "3", "n + 1"]),
    ("verify --cu-seqlens 0,4 --padded-to 8", ["--padded-to 8", "--cu-seqlens-padded"]),
    ("verify --docs 4 --padded-to 0", ["--padded-to 0", "from 1"]),
    ("verify --docs 4 --pairwise", ["--pairwise", "--matrix full"]),
    ("verify --docs 4 --time-limit 5", ["--time-limit 5", "checked whole"]),
    ("verify --matrix quick --time-limit 0", ["--time-limit 0", "more than 0"]),
    ("verify --random 5 --time-limit soon", ["'soon'", "--time-limit 120"]),
    ("verify --docs 4 --tokens 3", ["3 rows", "at least 4"]),
    ("verify --docs 4 --tokens-k 9", ["--tokens-k 9", "--docs-k"]),
    ("verify --docs 4,5 --docs-k 4", ["2 sequences", "1", "same number"]),
    ("verify --docs 4 --mask diagonal", ["'diagonal'", "full or causal"]),
    ("verify --docs 4 --align left", ["'left'", "top_left or bottom_right"]),
    ("verify --docs 4 --window 3", ["'3'", "LEFT,RIGHT"]),
    ("verify --docs 4 --window -2,0", ["-2", "-1 for unlimited"]),
    ("verify --docs 4 --window 1,-7", ["-7", "-1 for unlimited"]),
    ("verify --docs 4 --chunk 0", ["chunk size 0", "1 or more"]),
    ("verify --docs 4 --ranks 0", ["--ranks 0", "from 1"]),
    ("verify --docs 4 --ranks two", ["'two'", "--ranks 4"]),
    ("verify --docs 4 --ranks 2000000", ["--ranks 2000000", "1048576"]),
    ("verify --docs 4 --layout spiral", ["'spiral'", "zigzag"]),
    ("verify --docs 4 --layout explicit", ["explicit", "--runs FILE.json"]),
    (["verify", "--docs", "4", "--runs", f"[[{RUN}]]"], ["balanced", "--layout explicit"]),
    (["explain", "--docs", "4", "--layout", "explicit", "--ranks", "3", "--runs", f"[[{RUN}]]"],
     ["1 lists for 3 ranks", "one list a rank"]),
    (["verify", "--docs", ""], ["''", "--docs 256,512,1024"]),
    (["verify", "--docs", "5\n6\x1b[0m"], ["5?6?[0m", "--docs 256,512,1024"]),  # a message is one line
    ("explain --docs 4 --slices /dev/zero", ["/dev/zero", "64 MiB", "smaller file"]),
    ("verify --docs 4 --heads 3:2", ["3:2", "multiple"]),
    ("verify --docs 4 --heads 0", ["--heads 0", "from 1"]),
    ("verify --docs 4 --heads 4:2:1", ["4:2:1", "--heads 32:8"]),
    ("verify --docs 4 --dim 8:0", ["--dim 8:0", "from 1"]),
    ("verify --docs 4 --dtype fp8", ["fp8", "bf16"]),
    ("verify --docs 4 --scale nan", ["'nan'", "--scale 0.125"]),
    ("verify --docs 4 --softcap -1", ["-1", "0 for none"]),
    ("verify --docs 4 --softcap inf", ["'inf'", "--softcap 30"]),
    ("verify --docs 4 --sink kitchen", ["'kitchen'", "learnable"]),
    ("verify --docs 4 --seed -1", ["'-1'", "--seed 7"]),
    ("verify --docs 4 --json no/such/folder/x.json", ["no/such/folder/x.json", "folder that exists"]),
    ("verify --docs 4 --threads 2", ["--threads 2", "one problem"]),
    ("verify --random 0", ["--random 0", "from 1"]),
    ("verify --random 5 --large -1", ["--large -1", "one in 500"]),
    ("verify --random 5 --tokens-up-to 9", ["--tokens-up-to 9", "from 100"]),
    ("verify --docs 5 --large 2", ["--large 2 without --random", "--random 500"]),
    ("verify --docs 5 --tokens-up-to 900", ["--tokens-up-to 900 without --random", "--random 500"]),
    ("verify --random -5", ["--random -5", "from 1"]),
    ("verify --random many", ["'many'", "--random 2000"]),
    ("verify --random 5 --docs 4", ["--docs 4", "only --layout"]),
    ("verify --random 5 --mask causal", ["--mask causal", "only --layout"]),
    ("verify --random 5 --threads 0", ["--threads 0", "from 1"]),
    ("verify --docs 4 --schedule spiral", ["'spiral'", "all_gather, ring"]),
    ("verify --docs 4 --schedule ring,ring", ["'ring'", "twice", "or --schedule all"]),
    ("verify --docs 4 --schedule ring,", ["''", "or --schedule all"]),
    ("verify --docs 4 --schedule all_gather --key-order odd", ["'odd'", "auto, sequence, rank"]),
    ("verify --docs 4 --schedule ring --key-order rank", ["--key-order rank", "--schedule ring", "add all_gather"]),
    ("verify --docs 4 --schedule ring --head-groups 1", ["--head-groups 1", "--schedule ring", "leave it out"]),
    ("verify --docs 4 --schedule all_gather --head-groups 0", ["--head-groups 0", "1 or more"]),
    ("verify --docs 4 --schedule all_gather --head-groups 3", ["3", "1 K/V heads", "from 1 to 1"]),
    ("verify --docs 4 --schedule ring --ulysses 2", ["--ulysses 2", "add hybrid"]),
    ("verify --docs 4 --schedule hybrid --ulysses 3", ["3", "4 ranks", "divides"]),
    ("verify --docs 4 --schedule hybrid --mesh 3x2", ["3x2", "4 ranks", "product"]),
    ("verify --docs 4 --schedule hybrid --mesh 2y2", ["2y2", "2x4"]),
    ("verify --docs 4 --schedule ring --mesh 2x2", ["--mesh 2x2", "add hybrid"]),
    ("bench --docs 4 --mesh 2x2", ["--mesh", "--schedule"]),
    ("verify --docs 4 --schedule hybrid --outer exact", ["outer = exact", "all_gather, ring"]),
    ("verify --docs 4 --schedule ring --stages 2", ["--stages 2", "add exact"]),
    ("verify --docs 4 --schedule exact --stages none", ["'none'", "--stages 2"]),
    ("verify --docs 4 --schedule exact --ranks-per-step 2", ["--ranks-per-step 2", "add ring or hybrid"]),
    ("verify --docs 4 --schedule ring --ranks-per-step 0", ["--ranks-per-step 0", "1 or more"]),
    ("verify --docs 4 --schedule ring --comm pigeons", ["'pigeons'", "use threads"]),
    ("verify --docs 4 --schedule ring --ranks 1000", ["--ranks 1000", "to 256 ranks"]),
    ("verify --docs 4 --comm threads", ["--comm threads", "--schedule all"]),
    ("verify --docs 4 --key-order rank", ["--key-order rank", "--schedule all"]),
    ("verify --docs 4 --format sbhd", ["--format sbhd", "--schedule all"]),
    ("verify --docs 4 --checked", ["--checked", "--schedule all"]),
    ("verify --docs 4 --schedule ring --format dhs", ["'dhs'", "thd or bshd or sbhd"]),
    ("verify --docs 4 --schedule ring --format sbhd", ["sbhd", "balanced", "layout dual_chunk"]),
    ("verify --docs 8,15 --padded-to 8 --ranks 2 --layout dual_chunk --schedule ring --format bshd",
     ["document 0 has 8", "document 1 16", "one length"]),
    ("verify --docs 4 --heads 3:2 --head-map 0,1", ["2 heads", "3 query heads"]),
    ("verify --docs 4 --heads 3:2 --head-map 0,1,2", ["head 2 of 2", "from 0 to 1"]),
    ("verify --random 5 --format thd", ["--format thd", "only --layout"]),
    ("verify --matrix slow", ["'slow'", "quick or full"]),
    ("verify --matrix quick --docs 4", ["--docs 4", "its own problems", "--ranks"]),
    ("verify --matrix quick --head-groups 2", ["--head-groups 2", "its own problems"]),
    ("verify --matrix quick --random 5", ["--random 5", "its own problems"]),
    ("verify --matrix quick --ranks 2,x", ["'x'", "--ranks 2,3,4,8"]),
    ("verify --matrix quick --ranks 0", ["--ranks 0", "from 1 to 256"]),
    ("verify --matrix quick --layout zigzag,spiral", ["'spiral'", "zigzag"]),
    ("verify --matrix quick --dtype f32,fp8", ["fp8", "bf16"]),
    ("verify --matrix quick --threads 0", ["--threads 0", "from 1"]),
    ("verify --matrix quick --kernel nope", ["nope", "reference"]),
    ("verify --set odd-grid", ["'odd-grid'", "te-grid"]),
    ("verify --set te-grid --scale 0", ["--scale 0", "from 1"]),
    ("verify --set te-grid --scale 0.5", ["'0.5'", "--scale 32"]),
    ("verify --set te-grid --layout zigzag", ["--layout zigzag", "its own problems"]),
    ("verify --set te-grid --matrix quick", ["--matrix quick", "its own problems"]),
    ("explain --support --docs 4", ["--docs 4", "leave one of them out"]),
    ("explain --docs 4 --keys odd", ["'odd'", "sequence or rank"]),
    ("explain --docs 16 --layout striped --keys sequence", ["stride 4", "rank order"]),
    ("explain --docs 100 --view picture", ["100", "--view table"]),
    ("explain --docs 4 --schedule ring", ["--schedule ring", "--html FILE or --svg FILE"]),
    ("explain --docs 4 --title x", ["--title x", "--html FILE"]),
    ("explain --docs 4 --layout zigzag,striped", ["zigzag,striped"]),
    ("explain --docs 4 --html p.html --json n.json", ["--json n.json", "by themselves"]),
    ("explain --docs 4 --html p.html --view table", ["--view table", "by themselves"]),
    ("explain --docs 4 --html no/such/folder/p.html", ["--html", "no/such/folder/p.html", "folder that exists"]),
    ("explain --docs 4 --svg .", ["--svg", "'.'"]),
    ("explain --docs 4 --html p.html --schedule rings", ["'rings'", "all_gather, ring"]),
    ("explain --docs 4 --html p.html --schedule ring,ring", ["comes twice"]),
    ("explain --docs 4 --html p.html --layout zigzag,odd", ["'odd'", "zigzag"]),
    ("explain --docs 4 --html p.html --schedule ring --stages 3", ["--stages 3", "exact"]),
    ("explain --docs 4 --html p.html --schedule auto --stages 3", ["--stages 3", "leave it out"]),
    ("explain --docs 4 --html p.html --colour red", ["'red'", "rank or step"]),
    ("explain --docs 4 --html p.html --machine toaster", ["'toaster'", "h100-400g"]),
    ("explain --docs 4 --html p.html --machine ./none.json", ["./none.json", "machine file"]),
    ("explain --docs 4 --html p.html --ranks 5000", ["5000 ranks", "1024"]),
    ("explain --docs lognormal:count=2000,median=9 --svg p.svg --ranks 1000", ["1000 ranks", "2000 documents"]),
    ("explain --docs 4 --view film", ["'film'", "picture"]),
    ("explain --docs 2000000000 --chunk 1", ["2000000000", "larger chunk"]),
    ("explain --docs lognormal:count=4000000,median=5 --ranks 100000", ["4000000", "100000", "use fewer"]),
    ("bench --cases dense128,tiny", ["'tiny'", "dense64"]),
    ("bench --cases packed --docs 4", ["--docs 4", "--cases packed", "--dtype"]),
    ("bench --cases long --dtype bf16", ["--dtype bf16", "--list"]),
    ("bench --dtype fp8", ["fp8", "bf16"]),
    ("bench --pass sideways", ["'sideways'", "forward"]),
    ("bench --cases scaling --threads 1", ["scaling", "2 threads"]),
    ("bench --heads 4", ["no documents", "--docs"]),
    ("bench --docs 4 --ranks 2", ["--ranks 2", "one rank"]),
    ("bench --docs 4 --layout striped", ["--layout striped", "one rank"]),
    ("bench --docs 4 --kernel abacus", ["abacus", "reference"]),
    ("bench --docs 4 --dtype f64", ["cannot do custom f64 forward", "digits", "--kernel"]),
    ("bench --docs 4 --repeat 0", ["--repeat 0", "from 1"]),
    ("bench --docs 4 --repeat often", ["'often'", "--repeat 5"]),
    ("bench --docs 4 --threads 0", ["--threads 0", "from 1"]),
    ("bench --docs 4 --json no/such/folder/x.json", ["no/such/folder/x.json", "folder that exists"]),
    ("bench --docs 4 --peer true", ["--peer 'true'", "ended", "leave it out"]),
    ("bench --docs 4 --peer cat", ["--peer 'cat'", "name"]),
    ("bench --docs 4 --peer 'echo hello'", ["hello", "JSON"]),
    ("explain --docs 23 --micro 2 --ranks 2 --remainder refuse", ["23 tokens", "pad to 24"]),
    ("explain --docs 5,9,6,4 --micro 2 --ranks 2 --mask full", ["keys 5 .. 14", "0 .. 12", "causal"]),
    ("explain --docs 24 --micro 0", ["--micro 0", "from 1"]),
    ("explain --docs 24 --micro x", ["'x'", "--micro 4"]),
    ("explain --docs 24 --micro 2 --layout zigzag", ["--layout zigzag", "leave it out"]),
    ("explain --docs 24 --remainder pad", ["--remainder pad", "--micro 4"]),
    ("explain --docs 24 --micro 2 --remainder drop", ["'drop'", "pad or refuse"]),
    ("explain --docs 24 --even work", ["--even work", "--micro 4"]),
    ("explain --docs 24 --micro 30 --even work", ["30 micro-sequences of even work from 24 tokens on 4 ranks", "at most 6"]),
    ("verify --docs 24 --micro 0", ["--micro 0", "1 to 4096"]),
    ("verify --docs 24 --micro 2 --schedule ring", ["--micro 2 and --schedule ring"]),
    ("verify --docs 4 --kernel cuda.none", ["there is no kernel 'cuda.none'"]),
    ("bench --docs 4 --graph", ["--graph", "--kernel cuda.sm90"]),
    ("bench --docs 4 --keys-per-split 8", ["--keys-per-split", "--kernel cuda.sm90"]),
    ("bench --kernel cuda.sm90 --host --graph", ["--host", "--graph"]),
    ("bench --kernel cuda.sm90 --threads 2", ["--threads", "leave it out"]),
    ("bench --kernel cuda.sm90 --keys-per-split -2", ["--keys-per-split -2", "from -1"]),
]

SLICES = [
    ("nothing-here.json", ["nothing-here.json", "file that can be read"]),
    (".", ["'.'", "file that can be read"]),
    ("[", ["line 1, column 2", "write e.g."]),
    ('{"q":[0,4],"k":[0,4]}', ["not a list", "write e.g."]),
    ("[7]", ["slice 0", "7", "write e.g."]),
    ("[[[[[[1]]]]]]", ["too deep", "write e.g."]),
    ('[{"q":[0,4]}]', ["slice 0", '"k" is missing', "write e.g."]),
    (f'[{SLICE},{{"q":[0,4,5],"k":[0,4]}}]', ["slice 1", "[0,4,5]", "[begin, end]"]),
    ('[{"q":[0,4],"k":[0,4],"hii":2}]', ["hii", "keys q, k, lo, hi"]),
    ('[{"q":[0,4],"k":[0,1.5]}]', ["1.5", "whole number"]),
    ('[{"q":[0,4],"k":[0,"4"]}]', ['"4"', "whole number"]),
    ('[{"q":[0,4],"k":[0,4],"lo":-99999999999999}]', ["-99999999999999", "range"]),
    ('[{"q":[0,4],"k":[0,18446744073709551615]}]', ["18446744073709551615", "range"]),
    ('[{"q":[0,4],"k":[0,5]}]', ["0:5", "0 <= begin <= end <= 4"]),
    (f'[{SLICE},{{"q":[3,4],"k":[0,2]}}]', ["slices 0", "1 {q 3:4", "overlap", "cut one"]),
]

RUNS = [
    ("[3]", ["rank 0", "3", "list of runs"]),
    ('[[{"row":0,"token":0}]]', ["rank 0, run 0", '"count" is missing']),
    ('[[{"row":0,"token":0,"count":4,"step":1}]]', ["step", "stride"]),
    ('[[{"row":0,"token":0,"count":2}]]', ["token 2", "give every real token"]),
    ('[[{"row":0,"token":0,"count":9}]]', ["token 4", "inside the stream"]),
    (f'[[{RUN}],[{{"row":0,"token":3,"count":1}}]]', ["token 3", "held twice", "one run"]),
    ('[[{"row":0,"token":0,"count":4,"stride":0}]]', ["stride 0", "stride of 1 or more"]),
]


@pytest.mark.parametrize("args, says", CASES, ids=[str(c[0]) for c in CASES])
def test_flags(weft, args, says):
    weft.refused(*(shlex.split(args) if isinstance(args, str) else args), says=says)


@pytest.mark.parametrize("text, says", SLICES, ids=[s[0] for s in SLICES])
def test_slices(weft, text, says):
    weft.refused("verify", "--docs", "4", "--slices", text, says=says)


@pytest.mark.parametrize("flag", ["--mask full", "--align top_left", "--window 1,1", "--chunk 2"])
def test_slices_go_with_no_other_mask(weft, flag):
    weft.refused("verify", "--docs", 4, "--slices", f"[{SLICE}]", *flag.split(), says=[flag, "lo and hi"])


@pytest.mark.parametrize("text, says", RUNS, ids=[r[0] for r in RUNS])
def test_runs(weft, text, says):
    weft.refused("explain", "--docs", "4", "--layout", "explicit", "--runs", text, says=says)


@pytest.mark.parametrize("text, says", [
    (b'[\n  {"q": [0, 4], "k": oops}\n]', ["mask.json", "line 2"]),
    (f'[{SLICE}, {{"q": [0, 4]}}]'.encode(), ["mask.json: slice 1", '"k" is missing']),
    (b'[{"\xff\xfe": 1}]', ["mask.json"]),
])
def test_errors_in_a_file_name_it(weft, tmp_path, text, says):
    (tmp_path / "mask.json").write_bytes(text)
    weft.refused("explain", "--docs", "4", "--slices", "mask.json", says=says)


def test_refused_input_writes_no_json(weft):
    result = weft("verify", "--docs", "5,7", "--layout", "dual_chunk", "--ranks", "2", json_file=True)
    assert result.code == 2 and result.json is None
