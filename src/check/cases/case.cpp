#include "check/cases/case.h"

#include <sstream>

#include "text.h"

namespace weft::check {
namespace {

Stream stream_of(const Side& side) {
  return Stream::from_cu_seqlens(
      {.cu_seqlens = side.cu_seqlens, .cu_seqlens_padded = side.cu_seqlens_padded, .tokens = side.tokens});
}

template <class T, class Show>
std::string joined(const std::vector<T>& values, Show&& show) {
  std::string out;
  for (const T& v : values) {
    if (!out.empty()) out += ',';
    out += show(v);
  }
  return out;
}

std::string joined(const std::vector<Index>& values) {
  return joined(values, [](Index v) { return std::to_string(v); });
}

std::string number(double value) {
  std::ostringstream out;
  out.precision(17);
  out << value;
  return out.str();
}

std::string side_flags(const Side& side, const std::string& suffix) {
  std::string out = text(" --cu-seqlens", suffix, " ", joined(side.cu_seqlens));
  if (!side.cu_seqlens_padded.empty()) out += text(" --cu-seqlens-padded", suffix, " ", joined(side.cu_seqlens_padded));
  if (side.tokens) out += text(" --tokens", suffix, " ", *side.tokens);
  return out;
}

std::string json(const Slice& s) {
  const std::string lo = is_unlimited(s.lo) ? "" : text(",\"lo\":", s.lo);
  const std::string hi = is_unlimited(s.hi) ? "" : text(",\"hi\":", s.hi);
  return text("{\"q\":[", s.q_begin, ",", s.q_end, "],\"k\":[", s.k_begin, ",", s.k_end, "]", lo, hi, "}");
}

std::string json(const Run& r) {
  return text("{\"row\":", r.row, ",\"token\":", r.token, ",\"count\":", r.count, ",\"stride\":", r.stride, "}");
}

template <class T>
std::string json(const std::vector<T>& values) {
  return text("[", joined(values, [](const T& v) { return json(v); }), "]");
}

std::string mask_flags(const Mask& m) {
  if (m.slices) return text(" --slices '", json(*m.slices), "'");
  std::string out = m.causal ? " --mask causal" : " --mask full";
  if (m.align == Align::bottom_right) out += " --align bottom_right";
  if (m.left != -1 || m.right != -1) out += text(" --window ", m.left, ",", m.right);
  if (m.chunk) out += text(" --chunk ", *m.chunk);
  return out;
}

std::string tree_flags(const TreeCase& tree) {
  std::string nodes;
  for (std::size_t i = 0; i < tree.parents.size(); ++i)
    nodes += text(i == 0 ? "" : ",", "{\"parent\":", tree.parents[i], ",\"tokens\":", tree.lengths[i], "}");
  std::string out = text(" --tree '{\"nodes\":[", nodes, "]}'");
  if (tree.multiple > 1) out += text(" --padded-to ", tree.multiple);
  if (tree.rows) out += text(" --tokens ", *tree.rows);
  return out + mask_flags({.causal = true, .left = tree.left, .chunk = tree.chunk});
}

std::string attention_flags(const Case& c) {
  std::string out =
      text(" --heads ", c.heads_q, ":", c.heads_k, " --dim ", c.dim_qk, ":", c.dim_v, " --dtype ", name(c.dtype));
  if (!c.head_map.empty()) out += text(" --head-map ", joined(c.head_map));
  if (c.scale) out += text(" --scale ", number(*c.scale));
  if (c.softcap != 0) out += text(" --softcap ", number(c.softcap));
  if (c.sink == Case::SinkKind::learnable) out += " --sink learnable";
  if (c.sink == Case::SinkKind::off_by_one) out += " --sink off_by_one";
  if (c.format != Case::Format::thd) out += text(" --format ", name(c.format));
  return out;
}

}  // namespace

Problem problem_of(const Case& c) {
  Stream q = stream_of(c.q);
  return c.k ? Problem(Packing(std::move(q), stream_of(*c.k)), c.mask) : Problem(Packing(std::move(q)), c.mask);
}

Layouts layouts_of(const Case& c, const Problem& problem) {
  if (c.layout != LayoutKind::explicit_runs) return make_layouts(c.layout, problem, c.ranks);
  for (const auto& runs : {c.runs, c.k ? c.k_runs : c.runs}) {
    if (static_cast<Index>(runs.size()) != c.ranks)
      throw Error(text("an explicit layout gives runs for ", runs.size(), " ranks, there are ", c.ranks),
                  "give one list of runs a rank, on the query and the key side");
  }
  Layout q = Layout::explicit_runs(problem.packing().q(), c.runs);
  Layout k = c.k ? Layout::explicit_runs(problem.packing().k(), c.k_runs) : q;
  return {std::move(q), std::move(k)};
}

std::string_view name(Case::Format format) {
  return format == Case::Format::thd ? "thd" : format == Case::Format::bshd ? "bshd" : "sbhd";
}

void check_format(const Case& c, const Problem& problem) {
  if (c.format == Case::Format::thd) return;
  if (c.layout != LayoutKind::dual_chunk)
    throw Error(text("format ", name(c.format), " with layout ", name(c.layout)),
                "use layout dual_chunk, where each rank has as many rows of every document, or format thd");
  for (const Stream* stream : {&problem.packing().q(), &problem.packing().k()}) {
    for (Index i = 1; i < stream->sequences(); ++i) {
      if (stream->padded(i) != stream->padded(0))
        throw Error(text("format ", name(c.format), ": document 0 has ", stream->padded(0), " rows and document ", i,
                         " ", stream->padded(i)),
                    "pad them to one length (padded offsets), or use format thd");
    }
  }
}

TensorView local_view(const Case& c, const Stream& stream, const TensorView& t) {
  const Index batch = stream.sequences();
  if (c.format != Case::Format::sbhd || batch == 0) return t;  // bshd is thd under another name
  return sbhd(t.data, t.dtype, batch, t.rows / batch, t.heads, t.dim);
}

std::string flags(const Case& c) {
  std::string out = c.tree ? tree_flags(*c.tree) : side_flags(c.q, "");
  if (c.k) out += side_flags(*c.k, "-k");
  out += (c.tree ? "" : mask_flags(c.mask)) + text(" --layout ", name(c.layout), " --ranks ", c.ranks);
  if (c.layout == LayoutKind::explicit_runs) {
    out += text(" --runs '", json(c.runs), "'");
    if (c.k) out += text(" --runs-k '", json(c.k_runs), "'");
  }
  return out.substr(1) + attention_flags(c) + text(" --seed ", c.seed);
}

std::string mask_class(const Case& c) {
  const Mask& m = c.mask;
  if (c.tree) return "tree";
  if (m.slices) return "slices";
  const bool window = m.left != -1 || (m.right != -1 && !m.causal);
  if (m.chunk) return window ? "chunked_window" : "chunked";
  if (!m.causal && m.right > 0) return "window_right";
  if (window) return "window";
  if (!m.causal) return "full";
  return m.align == Align::bottom_right ? "bottom_right" : "causal";
}

}  // namespace weft::check
