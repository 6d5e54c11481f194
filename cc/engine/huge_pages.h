// Asks the system to back a large buffer with huge pages. Updates touch rows
// anywhere in a table, and with pages of 4 kB nearly every touch misses the
// processor's table of pages, which costs as much as the access itself.
//
// Best effort: where the system can't (or isn't Linux), nothing happens.
// Thread safe.

#ifndef TF_RECSYNC_CC_ENGINE_HUGE_PAGES_H_
#define TF_RECSYNC_CC_ENGINE_HUGE_PAGES_H_

#include <cstddef>

namespace recsync {

// Does its work, which takes about as long as copying the buffer, the first
// time that it is called for a buffer at this place of this size.
void AdviseHugePages(void* data, size_t bytes);

// The same for a buffer that nobody has written to yet: its pages are huge from
// the first, which is all that it takes.
void PreferHugePages(void* data, size_t bytes);

// The part of the buffer that consists of whole huge pages, as its start and
// size; a size of 0 where it is too small to be worth it.
void* HugePagesOf(void* data, size_t bytes, size_t* size);

}  // namespace recsync

#endif  // TF_RECSYNC_CC_ENGINE_HUGE_PAGES_H_
