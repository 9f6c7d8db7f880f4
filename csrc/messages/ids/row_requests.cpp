#include "messages/ids/row_requests.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "messages/ids/equal_bags.h"

namespace bls {
namespace {

using Cuts = std::vector<int64_t>;

/// Which ids of each looked-up feature are the same.
EqualBags equal_ids(const std::byte* ids, size_t id_bytes, std::span<const int64_t> counts,
                    const std::vector<Cuts>& cuts) {
  std::vector<BagBlock> blocks;
  for (size_t feature = 0; feature < counts.size(); ++feature) {
    const auto count = static_cast<size_t>(counts[feature]);
    blocks.push_back({count, count, !cuts[feature].empty()});
  }
  return EqualBags({nullptr, 0, ids, id_bytes, blocks});
}

/// Rows of a feature in the order of their numbers, by the cuts that they lie between.
struct Distinct {
  std::vector<int64_t> rows;
  std::vector<size_t> before;  ///< rows before each cut
};

size_t part_of(int64_t row, size_t feature, const Cuts& cuts) {
  const auto cut = std::upper_bound(cuts.begin(), cuts.end(), row) - cuts.begin();
  if (cut > 0 && static_cast<size_t>(cut) < cuts.size()) return static_cast<size_t>(cut);
  throw std::invalid_argument("id " + std::to_string(row) + " of feature " +
                              std::to_string(feature) + ", whose tables have rows from " +
                              std::to_string(cuts.front()) + " to " +
                              std::to_string(cuts.back() - 1));
}

/// Numbers rows as they first appear, those between two cuts one behind the other.
template <class Id>
Distinct number_rows(size_t feature, const Cuts& cuts, const std::byte* ids,
                     const RowGroups& groups, std::byte* numbers) {
  const std::span of_id = groups.of_row;
  std::vector<int64_t> rows(groups.count);
  for (size_t i = 0; i < of_id.size(); ++i) {
    Id id;
    std::memcpy(&id, ids + i * sizeof(id), sizeof(id));
    rows[of_id[i]] = static_cast<int64_t>(id);
  }
  Distinct distinct{std::vector<int64_t>(rows.size()), std::vector<size_t>(cuts.size(), 0)};
  std::vector<uint32_t> part(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    part[i] = static_cast<uint32_t>(part_of(rows[i], feature, cuts));
    ++distinct.before[part[i]];
  }
  std::partial_sum(distinct.before.begin(), distinct.before.end(), distinct.before.begin());
  std::vector<size_t> next = distinct.before;
  std::vector<Id> number(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    const size_t place = next[part[i] - 1]++;
    number[i] = static_cast<Id>(place);
    distinct.rows[place] = rows[i];
  }
  for (size_t i = 0; i < of_id.size(); ++i) {
    std::memcpy(numbers + i * sizeof(Id), &number[of_id[i]], sizeof(Id));
  }
  return distinct;
}

template <class Row>
void write_rows(std::byte* to, std::span<const int64_t> rows, int64_t first) {
  for (const int64_t row : rows) {
    const auto local = static_cast<Row>(row - first);
    std::memcpy(to, &local, sizeof(local));
    to += sizeof(local);
  }
}

}  // namespace

RowRequests::RowRequests(size_t features, std::vector<AskedBlock> blocks)
    : blocks_(std::move(blocks)), cuts_(features) {
  for (const AskedBlock& block : blocks_) {
    if (block.feature >= features || block.first < 0 || block.end < block.first) {
      throw std::invalid_argument(
          "rows " + std::to_string(block.first) + " to " + std::to_string(block.end) +
          " of feature " + std::to_string(block.feature) + " of " + std::to_string(features));
    }
    for (const int64_t cut : {block.first, block.end}) cuts_[block.feature].push_back(cut);
    if (block.end - block.first > std::numeric_limits<int32_t>::max()) row_bytes_ = sizeof(int64_t);
  }
  for (Cuts& cuts : cuts_) {
    std::sort(cuts.begin(), cuts.end());
    cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
  }
}

AskedRows RowRequests::ask(const std::byte* ids, size_t id_bytes,
                           std::span<const int64_t> counts) const {
  if (counts.size() != cuts_.size()) {
    throw std::invalid_argument("ids of " + std::to_string(counts.size()) + " features, not " +
                                std::to_string(cuts_.size()));
  }
  const auto total = static_cast<size_t>(std::accumulate(counts.begin(), counts.end(), int64_t{0}));
  AskedRows asked;
  asked.numbers = std::make_shared<IdsMemory>(total * id_bytes);
  const EqualBags equal = equal_ids(ids, id_bytes, counts, cuts_);
  const auto number = id_bytes == sizeof(int32_t) ? number_rows<int32_t> : number_rows<int64_t>;
  std::vector<Distinct> distinct;
  std::byte* numbers = asked.numbers->data.get();
  for (size_t feature = 0; feature < cuts_.size(); ++feature) {
    const size_t bytes = static_cast<size_t>(counts[feature]) * id_bytes;
    if (const RowGroups& groups = equal.of(feature); groups.known()) {
      distinct.push_back(number(feature, cuts_[feature], ids, groups, numbers));
    } else {
      if (bytes != 0) std::memcpy(numbers, ids, bytes);
      distinct.push_back({{}, std::vector<size_t>(cuts_[feature].size(), 0)});
    }
    asked.distinct.push_back(static_cast<int64_t>(distinct.back().rows.size()));
    ids += bytes;
    numbers += bytes;
  }
  size_t rows = 0;
  for (const AskedBlock& block : blocks_) {
    const Cuts& cuts = cuts_[block.feature];
    const auto before = [&](int64_t row) {
      const auto cut = std::lower_bound(cuts.begin(), cuts.end(), row) - cuts.begin();
      return distinct[block.feature].before[static_cast<size_t>(cut)];
    };
    const size_t first = before(block.first), count = before(block.end) - first;
    asked.first_numbers.push_back(static_cast<int64_t>(first));
    asked.counts.push_back(static_cast<int64_t>(count));
    rows += count;
  }
  asked.rows = std::make_shared<IdsMemory>(rows * row_bytes_);
  const auto write = row_bytes_ == sizeof(int32_t) ? write_rows<int32_t> : write_rows<int64_t>;
  std::byte* to = asked.rows->data.get();
  for (size_t i = 0; i < blocks_.size(); ++i) {
    const auto count = static_cast<size_t>(asked.counts[i]);
    const int64_t* first = distinct[blocks_[i].feature].rows.data() + asked.first_numbers[i];
    write(to, {first, count}, blocks_[i].first);
    to += count * row_bytes_;
  }
  return asked;
}

}  // namespace bls
