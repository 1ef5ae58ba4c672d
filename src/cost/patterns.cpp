#include "cost/patterns.h"

#include <algorithm>

#include "index.h"

namespace weft::cost {
void Patterns::finish(Pattern& p) const {
  for (std::size_t l = 0; l < topology_.levels(); ++l) {
    if (machine_.levels[l].uplink == 0) continue;
    const Index below = topology_.below(l);
    for (Index first = 0; first < ranks_; first += below) {
      const Index end = min_of(ranks_, first + below);
      double in = 0, out = 0;
      for (Index r = first; r < end; ++r) {
        in += p.loads[at(r)].in[l];
        out += p.loads[at(r)].out[l];
      }
      for (Index r = first; r < end; ++r) p.loads[at(r)].up[l] = std::max(in, out);
    }
  }
  p.seconds.reserve(p.loads.size());
  p.interference.reserve(p.loads.size());
  for (const Load& load : p.loads) {
    p.seconds.push_back(topology_.seconds(load));
    p.interference.push_back(topology_.interference(load));
  }
}

Pattern Patterns::listed(std::vector<Sent> messages, bool adds, bool uneven) const {
  Pattern p{.peers = Pattern::Peers::listed, .size = 1, .uneven = uneven};
  p.loads.resize(at(ranks_));
  p.from_begin.assign(at(ranks_) + 1, 0);
  p.to_begin.assign(at(ranks_) + 1, 0);
  std::erase_if(messages, [](const Sent& m) { return m.bytes == 0; });
  for (const Sent& m : messages) {
    p.loads[at(m.to)].copied += copies(m.bytes, adds);
    if (m.from == m.to) continue;
    topology_.receive(p.loads[at(m.to)], m.to, m.from, m.bytes);
    topology_.send(p.loads[at(m.from)], m.from, m.to, m.bytes);
    ++p.from_begin[at(m.to) + 1];
    ++p.to_begin[at(m.from) + 1];
  }
  for (std::size_t r = 0; r < at(ranks_); ++r) {
    p.from_begin[r + 1] += p.from_begin[r];
    p.to_begin[r + 1] += p.to_begin[r];
  }
  p.from.resize(p.from_begin.back());
  p.from_bytes.resize(p.from_begin.back());
  p.to.resize(p.to_begin.back());
  std::vector<std::size_t> next_from(p.from_begin.begin(), p.from_begin.end() - 1),
      next_to(p.to_begin.begin(), p.to_begin.end() - 1);
  for (const Sent& m : messages) {
    if (m.from == m.to) continue;
    p.from_bytes[next_from[at(m.to)]] = m.bytes;
    p.from[next_from[at(m.to)]++] = static_cast<std::uint32_t>(m.from);
    p.to[next_to[at(m.from)]++] = static_cast<std::uint32_t>(m.to);
  }
  finish(p);
  return p;
}

Pattern Patterns::spans(std::shared_ptr<const std::vector<Span>> rows, Index repeat, double each, bool back) const {
  Pattern p{.peers = Pattern::Peers::spans, .size = 1, .uneven = true};
  p.spans = std::move(rows);
  p.repeat = repeat;
  p.each = each;
  p.back = back;
  p.loads.resize(at(ranks_));
  // Most messages go further than the inner levels reach. Those are added up at once: where a range of ranks begins and
  // ends. Bytes are whole numbers, so sums are exact in any order.
  const std::size_t far = topology_.levels() - 1;
  const Index reach = far > 0 ? machine_.levels[far - 1].ranks : 0;
  std::vector<double> in(at(ranks_) + 1, 0.0), out = in, kept = in;
  std::vector<Index> received(at(ranks_) + 1, 0), sent = received;
  const auto range = [&](auto& to, Index begin, Index count, auto value) {
    to[at(begin)] += value;
    to[at(begin + count)] -= value;
  };
  for_each_message(p, ranks_, [&](Index from, Index to, Index count, double bytes) {
    if (from == to) return range(kept, to, count, bytes);
    range(sent, from, count, Index{1});
    if (max_of(from, to) - min_of(from, to) >= reach) {
      range(in, to, count, bytes);
      range(out, from, count, bytes);
      range(received, to, count, Index{1});
      return;
    }
    for (Index i = 0; i < count; ++i) {
      topology_.receive(p.loads[at(to + i)], to + i, from + i, bytes);
      topology_.send(p.loads[at(from + i)], from + i, to + i, bytes);
    }
  });
  p.sent_messages.reserve(at(ranks_));
  double in_sum = 0, out_sum = 0, kept_sum = 0;
  Index received_sum = 0, sent_sum = 0;
  for (std::size_t r = 0; r < at(ranks_); ++r) {
    in_sum += in[r];
    out_sum += out[r];
    kept_sum += kept[r];
    received_sum += received[r];
    sent_sum += sent[r];
    Load& load = p.loads[r];
    load.in[far] += in_sum;
    load.out[far] += out_sum;
    load.messages[far] += received_sum;
    load.bytes_in += static_cast<Index>(in_sum);
    load.bytes_out += static_cast<Index>(out_sum);
    load.copied = copies(static_cast<double>(load.bytes_in) + kept_sum, back);
    p.sent_messages.push_back(static_cast<std::uint32_t>(sent_sum));
  }
  finish(p);
  return p;
}

Pattern Patterns::gather(Index group, const std::vector<double>& bytes, bool back) const {
  constexpr Index kFew = 1024;
  if (ranks_ <= kFew && !machine_.relays_gathers && std::find(bytes.begin(), bytes.end(), 0.0) != bytes.end()) {
    std::vector<Sent> all;  // nobody waits for a rank that has nothing
    for (Index from = 0; from < ranks_; ++from)
      for (Index to = from % group; to < ranks_; to += group)
        all.push_back(back ? Sent{to, from, bytes[at(from)]} : Sent{from, to, bytes[at(from)]});
    return listed(std::move(all), back, false);
  }
  Pattern p{.peers = Pattern::Peers::same_place, .size = group};
  p.loads.resize(at(ranks_));
  const Index count = ranks_ / group;
  std::vector<double> sums(at(count) + 1);
  for (Index place = 0; place < group; ++place) {
    for (Index g = 0; g < count; ++g) sums[at(g) + 1] = sums[at(g)] + bytes[at(g * group + place)];
    for (Index me = place; me < ranks_; me += group) {
      const double mine = bytes[at(me)];
      const auto theirs = [&](Range r) { return sums[at(r.end)] - sums[at(r.begin)]; };
      const auto own = [&](Range r) { return mine * static_cast<double>(r.size()); };
      const bool relays = machine_.relays_gathers;
      Load& load = p.loads[at(me)];
      load = back ? collective(me, place, group, count, own, theirs, relays)
                  : collective(me, place, group, count, theirs, own, relays);
      load.copied = copies(static_cast<double>(load.bytes_in) + mine, back);
    }
  }
  finish(p);
  return p;
}

Pattern Patterns::swap(Index group, const std::vector<double>& bytes, bool back, bool adds) const {
  Pattern p{.peers = Pattern::Peers::block, .size = group};
  std::vector<double> sums(at(group) + 1, 0.0);  // whole numbers: exact in any order
  for (std::size_t i = 0; i < at(group); ++i) sums[i + 1] = sums[i] + bytes[i];
  for (Index me = 0; me < ranks_; ++me) {
    const Index block = me / group * group;
    const double mine = bytes[at(me - block)];
    const auto theirs = [&](Range r) { return sums[at(r.end)] - sums[at(r.begin)]; };
    const auto own = [&](Range r) { return mine * static_cast<double>(r.size()); };
    p.loads.push_back(back ? collective(me, block, 1, group, theirs, own, false)
                           : collective(me, block, 1, group, own, theirs, false));
    p.loads.back().copied = copies(static_cast<double>(p.loads.back().bytes_in) + mine, adds);
  }
  finish(p);
  return p;
}

Pattern Patterns::numbers(double bytes) const {
  Pattern p{.peers = Pattern::Peers::block, .size = ranks_};
  for (Index me = 0; me < ranks_; ++me) {
    const auto all = [&](Range r) { return bytes * static_cast<double>(r.size()); };
    p.loads.push_back(collective(me, 0, 1, ranks_, all, all, false));
    p.loads.back().copied = bytes * static_cast<double>(ranks_);
  }
  finish(p);
  return p;
}

}  // namespace weft::cost
