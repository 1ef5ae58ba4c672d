#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "index.h"
#include "kernel/check_args.h"
#include "kernel/cpu/parallel.h"
#include "kernel/cpu/rows.h"
#include "kernel/cpu/target.h"
#include "kernel/cpu/work.h"

namespace weft::cpu {
namespace {

// out and lse, computed again if the caller did not give them.
struct Statistics {
  Statistics(const Target& target, KernelBackwardArgs& args) {
    if (args.out.given()) return;
    out.resize(at(args.q.rows * args.q.heads * args.v.dim));
    lse.resize(at(args.q.rows * args.q.heads));
    const TensorView out_view = thd(out.data(), DType::f32, args.q.rows, args.q.heads, args.v.dim);
    const TensorView lse_view = token_heads(lse.data(), DType::f32, args.q.rows, args.q.heads);
    forward(target, forward_of(args, out_view, lse_view));
    args.out = out_view;
    args.lse = lse_view;
  }
  std::vector<float> out, lse;
};

// One component for one group of heads. Each part has sums of its own; they are added in the order of the parts,
// whichever finishes first, and freed at once.
struct Family {
  const Component* component;
  const HeadGroup* heads;
  std::mutex guard;
  std::vector<std::vector<float>> sums;  // by part: dK rows, then dV rows; empty before and after
  std::vector<char> ended;               // by part
  std::size_t next = 0;                  // part to be added next
  std::vector<float> total;              // of all added so far, if the outputs cannot hold it
  Range held;                            // sum rows of total
};

struct Job {
  Family* family;
  std::size_t part;
};

class Backward {
 public:
  Backward(const Target& target, const KernelBackwardArgs& args)
      : target_(target),
        width_k_(sum_width(args.k.dim)),
        width_v_(sum_width(args.v.dim)),
        args_(args),
        statistics_(target, args_),
        slices_(useful_slices(args.slices)),
        groups_(head_groups(args.q.heads, args.k.heads, args.attention.head_map)),
        call_{args_, slices_,
              static_cast<float>(args.attention.scale.value_or(1 / std::sqrt(static_cast<double>(args.q.dim)))),
              static_cast<float>(args.attention.softcap)},
        block_(target.block_rows(call_, largest_group(groups_))),
        components_(components(slices_, block_, args.k.heads)) {}

  void run() {
    clear_untouched();
    make_jobs();
    dsink_.assign(jobs_.size() * at(args_.q.heads), 0.0f);
    const Index scratch_floats = target_.backward_scratch(call_, block_ * largest_group(groups_));
    std::atomic<std::size_t> next{0};
    Index pairs = 0;
    for (const Component& c : components_) pairs += c.pairs * args_.q.heads;
    on_threads(worth_threads(pairs, args_.q.dim + args_.v.dim), [&] {
      Scratch scratch;
      for (std::size_t i = next++; i < jobs_.size(); i = next++) do_job(i, scratch.get(scratch_floats));
    });
    if (args_.dsink.given()) store_dsink();
  }

 private:
  // Rows that no slice touches get exact zeros; the others are written once, by the part that owns them.
  void clear_untouched() {
    std::vector<char> rows(at(args_.q.rows), 0), keys(at(args_.k.rows), 0);
    for (const Slice& s : slices_) std::fill(rows.begin() + s.q_begin, rows.begin() + s.q_end, 1);
    for (const Component& c : components_)
      for (const Range& r : c.keys) std::fill(keys.begin() + r.begin, keys.begin() + r.end, 1);
    std::vector<char> used(at(args_.k.heads), 0);
    for (const HeadGroup& g : groups_) used[at(g.kv_head)] = !g.heads.empty();
    for (Index r = 0; r < args_.q.rows; ++r)
      for (Index h = 0; !rows[at(r)] && h < args_.q.heads; ++h) clear_row(args_.dq, r, h);
    for (Index r = 0; !args_.add_keys && r < args_.k.rows; ++r)
      for (Index h = 0; h < args_.k.heads; ++h) {
        if (keys[at(r)] && used[at(h)]) continue;
        clear_row(args_.dk, r, h);
        clear_row(args_.dv, r, h);
      }
  }

  // The most expensive components first; the parts of a family one after another, so that few sums are alive at a time.
  void make_jobs() {
    std::vector<const Component*> order;
    for (const Component& c : components_) order.push_back(&c);
    std::sort(order.begin(), order.end(),
              [](auto a, auto b) {  // all point into one vector, so equal costs keep its order
                return a->pairs != b->pairs ? a->pairs > b->pairs : a < b;
              });
    for (const Component* c : order) {
      for (const HeadGroup& g : groups_) {
        if (g.heads.empty()) continue;
        families_.push_back(std::make_unique<Family>());
        Family& family = *families_.back();
        family.component = c;
        family.heads = &g;
        family.sums.resize(c->parts.size());
        family.ended.resize(c->parts.size(), 0);
        for (std::size_t p = 0; p < c->parts.size(); ++p) jobs_.push_back({&family, p});
      }
    }
  }

  void do_job(std::size_t job, float* scratch) {
    Family& family = *jobs_[job].family;
    const std::size_t p = jobs_[job].part;
    const RowPart& part = family.component->parts[p];
    std::vector<float> sums(at(part.sums.size() * (width_k_ + width_v_)), 0.0f);
    target_.backward_part(
        call_, {part.blocks, family.component->slices, *family.heads, part.sums.begin, sums.data(),
                sums.data() + part.sums.size() * width_k_, dsink_.data() + job * at(args_.q.heads), scratch});
    const std::lock_guard lock(family.guard);
    family.sums[p] = std::move(sums);
    family.ended[p] = 1;
    while (family.next < family.ended.size() && family.ended[family.next]) add_part(family, family.next++);
  }

  // f32 gradients are summed in the output; others in an f32 buffer, and rounded after the last part.
  void add_part(Family& family, std::size_t p) {
    const Component& c = *family.component;
    const RowPart& part = c.parts[p];
    std::vector<float> sums = std::move(family.sums[p]);
    const bool only = c.parts.size() == 1, last = p + 1 == c.parts.size();
    const bool f32 = args_.dk.dtype == DType::f32 && args_.dv.dtype == DType::f32;
    const bool in_place = args_.add_keys || (!only && f32);
    if (p == 0 && in_place && !args_.add_keys) clear_keys(family);
    Range held = part.sums;
    if (!only && !in_place) {
      add_to_total(family, held, std::move(sums), last);
      if (!last) return;
      sums = std::move(family.total);
      held = family.held;
    }
    const float *dk = sums.data(), *dv = dk + held.size() * width_k_;
    Index sum = 0;  // row of the sums
    for (const Range& r : c.keys) {
      for (Index key = r.begin; key < r.end; ++key, ++sum) {
        if (sum < held.begin || sum >= held.end) continue;
        const Index head = family.heads->kv_head, from = sum - held.begin;
        if (in_place) {
          add_to_row(args_.dk, key, head, dk + from * width_k_);
          add_to_row(args_.dv, key, head, dv + from * width_v_);
        } else {
          target_.store_row(args_.dk, key, head, dk + from * width_k_);
          target_.store_row(args_.dv, key, head, dv + from * width_v_);
        }
      }
    }
  }

  void clear_keys(const Family& family) {
    for (const Range& r : family.component->keys) {
      for (Index key = r.begin; key < r.end; ++key) {
        clear_row(args_.dk, key, family.heads->kv_head);
        clear_row(args_.dv, key, family.heads->kv_head);
      }
    }
  }

  // The memory of what has more rows is kept: of causal rows, later parts have all keys of those before.
  void add_to_total(Family& family, Range rows, std::vector<float> sums, bool last) const {
    Range both{min_of(family.held.begin, rows.begin), max_of(family.held.end, rows.end)};
    if (family.total.empty()) both = rows;
    if (last) both = {0, family.component->sum_rows};
    if (rows == both) {
      std::swap(family.total, sums);
      std::swap(family.held, rows);
    } else if (family.total.empty() || !(family.held == both)) {
      std::vector<float> wider(at(both.size() * (width_k_ + width_v_)), 0.0f);
      std::swap(family.total, wider);
      const Range before = std::exchange(family.held, both);
      if (!wider.empty()) add_sums(wider, before, family);
    }
    if (!sums.empty()) add_sums(sums, rows, family);
  }
  void add_sums(const std::vector<float>& from, Range rows, Family& to) const {
    float *dk = to.total.data(), *dv = dk + to.held.size() * width_k_;
    const Index first = rows.begin - to.held.begin;
    add(from.data(), rows.size() * width_k_, dk + first * width_k_);
    add(from.data() + rows.size() * width_k_, rows.size() * width_v_, dv + first * width_v_);
  }
  static void add(const float* from, Index count, float* to) {
    for (Index i = 0; i < count; ++i) to[i] += from[i];
  }

  static void add_to_row(const TensorView& view, Index row, Index head, const float* from) {
    float* to = view.at<float>(row, head);
    for (Index i = 0; i < view.dim; ++i) to[i] += from[i];
  }

  void store_dsink() {
    for (Index h = 0; h < args_.q.heads; ++h) {
      double sum = 0;
      for (std::size_t job = 0; job < jobs_.size(); ++job)
        sum += static_cast<double>(dsink_[job * at(args_.q.heads) + at(h)]);
      store_number(args_.dsink, 0, h, static_cast<float>(sum));
    }
  }

  const Target& target_;
  const Index width_k_, width_v_;  // of a row of the sums
  KernelBackwardArgs args_;
  Statistics statistics_;
  std::vector<Slice> slices_;
  std::vector<HeadGroup> groups_;
  BackwardCall call_;
  Index block_;
  std::vector<Component> components_;
  std::vector<std::unique_ptr<Family>> families_;
  std::vector<Job> jobs_;
  std::vector<float> dsink_;  // [jobs, hq]
};

}  // namespace

void backward(const Target& target, const KernelBackwardArgs& args) { Backward(target, args).run(); }

}  // namespace weft::cpu
